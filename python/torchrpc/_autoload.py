"""The hook that `import torch` calls at its end: an entry point of the group `torch.backends`.

Most processes that run this hook do not use torchrpc, so it must be cheap.
"""

import os
import sys

from . import _select_binaries


def asked_to_replace() -> bool:
    """Return whether TORCHRPC_REPLACE asks for the replacement of torch.distributed.rpc."""
    return os.environ.get("TORCHRPC_REPLACE", "").strip().lower() not in ("", "0", "false", "no", "off")


def autoload() -> None:
    """Replace torch's RPC if TORCHRPC_REPLACE asks for it, or if this torch was built without RPC.

    Raises:
        RuntimeError: TORCHRPC_REPLACE asks for the replacement, but torchrpc cannot replace torch's RPC.
    """
    if why := _select_binaries():
        if asked_to_replace():
            raise RuntimeError(why)
        del sys.modules["torchrpc"]  # so that a later `import torchrpc` raises the error
        return
    if asked_to_replace():
        from ._install import install

        install()
    elif not hasattr(sys.modules["torch"]._C, "_rpc_init"):
        from ._install import fill_gap

        fill_gap()
