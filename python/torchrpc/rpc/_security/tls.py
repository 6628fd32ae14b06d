"""The TLS options of a worker."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The PEM files with which a worker proves its name over TLS 1.3, and verifies the names of others.

    The worker reads the files at the start, and again when they change: new connections use the new contents, open
    connections go on. A value of None means the environment variable. The files must exist, and OpenSSL 3 must be
    installed, when the worker joins its group.

    Args:
        certificate (path): the certificate of this worker, followed by the intermediate certificates. Default:
            TORCHRPC_TLS_CERTIFICATE.
        key (path): its private key, without a passphrase. Default: TORCHRPC_TLS_KEY.
        ca (path): the certificates of the authorities that sign workers' certificates; their revocation lists, too, if
            there are any; then each authority needs a list. Default: TORCHRPC_TLS_CA.
        names (str or list of str): how a certificate names a worker, as a DNS name or a URI of its subject alternative
            name: `{name}` stands for the worker's name, `{base}` for the name without the number at its end. For
            example `"{name}.trainers.prod.svc"` or `"spiffe://example.org/ns/prod/sa/{base}"`. All workers need the
            same. Default: TORCHRPC_TLS_NAMES, where spaces separate several; else `"{name}"`.

    Raises:
        TypeError: an argument of another type.
        ValueError: a name with a space.
    """

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    names: str | Sequence[str] | None = None

    __module__ = "torchrpc.rpc"

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "ca"):
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike | None):
                raise TypeError(f"TlsOptions: {name} must be a path, but is a {type(value).__name__}.")
        for name in self._name_list():
            if not isinstance(name, str):
                raise TypeError(f"TlsOptions: names must be a str or a list of str, but has a {type(name).__name__}.")
            if not name or len(name.split()) != 1:
                raise ValueError(f"TlsOptions: {name!r} in names is no DNS name or URI.")

    def _name_list(self) -> Sequence[str]:
        if isinstance(self.names, str):
            return [self.names]
        if not isinstance(self.names, Sequence | None):
            raise TypeError(f"TlsOptions: names must be a str or a list of str, but is a {type(self.names).__name__}.")
        return self.names or []


def tls_texts(tls: TlsOptions | None) -> dict[str, str]:
    """Return the options for the core.

    Raises:
        TypeError: `tls` is not a TlsOptions.
    """
    if tls is None:
        return {}
    if not isinstance(tls, TlsOptions):
        raise TypeError(f"tls must be rpc.TlsOptions, but is a {type(tls).__name__}.")
    paths = {"certificate": tls.certificate, "key": tls.key, "ca": tls.ca}
    texts = {name: os.fspath(path) for name, path in paths.items() if path is not None}
    return texts | {"names": " ".join(tls._name_list())}
