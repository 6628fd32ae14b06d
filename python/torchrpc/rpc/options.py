"""The options of a worker. Devices may have any form that torch.device accepts."""

import inspect
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from torchrpc._C import _TensorPipeRpcBackendOptionsBase

from ._health import HealthOptions
from ._security.allow_list import Entries, allowances_of
from ._security.limits import AuditLogType, Limits, Quota, audit_target, limit_numbers, quota_numbers
from ._security.tls import TlsOptions, tls_texts
from ._values.names import replaces_torch
from .constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC

__all__ = ["TensorPipeRpcBackendOptions"]

DeviceType: TypeAlias = int | str | torch.device


def _any_device(device: DeviceType) -> torch.device:
    # torch.device(0) is the accelerator of this machine, and fails on machines that have none.
    bare = isinstance(device, int) and not torch.accelerator.is_available()
    found = torch.device("cuda", device) if bare else torch.device(device)
    if found.type == "meta":
        raise ValueError("Tensors on the device meta have no data: they need no device map.")
    # "cuda" means the current device of each thread; in a map it means the first device.
    return torch.device(found.type, 0) if found.index is None and found.type != "cpu" else found


def _to_device(device: DeviceType) -> torch.device:
    device = _any_device(device)
    if device.type == "cpu":
        raise ValueError("`set_devices` expect a list of CUDA devices, or of another accelerator, but got a CPU.")
    return device


def _to_device_map(device_map: Mapping[DeviceType, DeviceType]) -> dict[torch.device, torch.device]:
    full: dict[torch.device, torch.device] = {}
    reverse: dict[torch.device, torch.device] = {}
    for key, value in device_map.items():
        source, target = _any_device(key), _any_device(value)
        if target in reverse:
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping, trying to map {source} and {reverse[target]} to {target}"
            )
        full[source] = target
        reverse[target] = source
    return full


def _to_device_maps(maps: Mapping[str, Mapping[DeviceType, DeviceType]] | str | None) -> dict:
    if isinstance(maps, str):
        if maps != "identity":
            raise ValueError(f'device_maps must be a dict or "identity", but is {maps!r}.')
        return {}
    return {to: _to_device_map(device_map) for to, device_map in (maps or {}).items()}


def _to_device_list(devices: Iterable[DeviceType]) -> list[torch.device]:
    return [_to_device(device) for device in devices]


def _checked_secret(secret: str | bytes | None) -> str | bytes:
    if secret is None:
        return ""
    if not isinstance(secret, str | bytes):
        raise TypeError(f"secret must be a str or bytes, but is a {type(secret).__name__}.")
    if not secret:
        raise ValueError("secret is empty. Give at least 16 random bytes, or leave it out.")
    return secret


def _checked_encryption(encryption: str | None) -> str:
    if encryption not in (None, "auto", "on", "off"):
        raise ValueError(f"encryption is {encryption!r}: it can be 'auto', 'on' or 'off'.")
    return encryption or ""


def _uses_pickles(pickle: str | None) -> bool:
    value = os.environ.get("TORCHRPC_PICKLE") or "on" if pickle is None else pickle
    if value not in ("on", "off"):
        raise ValueError(f'pickle (or TORCHRPC_PICKLE) must be "on" or "off", but is {value!r}.')
    return value == "on"


# The names that torch accepts, on any machine; and "native".
_TRANSPORTS = {"shm", "ibv", "uv", "native"}
_CHANNELS = {"cma", "mpt_uv", "basic", "xth", "cuda_ipc", "cuda_gdr", "cuda_xth", "cuda_basic"}


def _check_names(kind: str, names: list[str] | None, known: set[str]) -> None:
    """Raise RuntimeError, as torch does, for an unknown name of a transport or channel."""
    for name in names or ():
        if name not in known:
            raise RuntimeError(f"Unknown {kind}: {name}. There are {', '.join(sorted(known))}.")


class TensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """The options of this worker, for `init_rpc`.

    Args:
        num_worker_threads (int): threads that serve incoming calls.
        rpc_timeout (float): default time-out of calls in seconds; 0: no limit.
        init_method (str): where the workers meet: `env://` (MASTER_ADDR and MASTER_PORT), `tcp://host:port` or
            `file:///path/on/a/shared/file/system`.
        device_maps (dict or str): callee's name -> {device here: device there}: the callee's devices for the tensors of
            an accelerator in calls to that worker; its replies use the inverse map. One of the two devices can be the
            CPU. `"identity"`: each device maps to the device of the same name, on all workers that have it and that
            `set_device_map` does not name. Default: no maps; then only CPU tensors can be sent.
        devices (list): the devices of an accelerator that this worker uses; default: those that the device maps of all
            workers name. Each function that this worker serves gets its own streams on them.
        share_device_tensors (bool): send tensors of this worker's devices without a copy to workers of this machine
            that can use the memory itself (docs: devices). Neither side may change such a tensor while the other uses
            it, and this worker must not end while another worker uses one.
        transport (str): `"native"` (shared memory within a host, else TCP), `"tcp"` (TCP everywhere), `"tensorpipe"`,
            `"ucx"` (UCX, if it is installed: `torchrpc[ucx]`) or `"auto"`, the same on all workers; default: the
            environment variable TORCHRPC_TRANSPORT, else `"auto"`, which is native.
        secret (str or bytes): the secret by which workers authenticate each other when they connect, at least 16 bytes,
            the same on all workers; default: the environment variables TORCHRPC_SECRET_FILE (a file that only its owner
            may read) or TORCHRPC_SECRET. Without one, workers that meet at a loopback address use a key that only
            processes of their user can read; others use a random secret, which the rendezvous gives to every
            process that asks.
        identity (path): the file with the identity of this worker, which `torchrpc keygen` makes: a certificate of its
            name and role, and the group's secret. If one worker has an identity, all must. Default: the environment
            variable TORCHRPC_IDENTITY_FILE, else none: without `tls`, workers then do not prove
            their names.
        tls (TlsOptions): the TLS certificate of this worker, its key, and the authorities that sign workers'
            certificates: another way to prove names, and to encrypt TCP. If one worker uses TLS, all must. Default: the
            environment variables TORCHRPC_TLS_CERTIFICATE, TORCHRPC_TLS_KEY and TORCHRPC_TLS_CA, else none.
        encryption (str): whether connections between hosts (TCP) are encrypted: `"on"`; `"off"`; or `"auto"`, which
            means on if a secret was given. The same on all workers; default: the environment variable
            TORCHRPC_ENCRYPTION, else `"auto"`. With a secret that the rendezvous distributes, encryption protects
            only against attackers that cannot reach the rendezvous.
        port (int or str): the TCP port to listen on, or a range such as `"29600-29700"`, of which the first free one is
            used; 0 or default: the environment variable TORCHRPC_PORT, else any free port.
        allowed_functions (list or dict): the only functions that other workers may run here: functions and classes,
            their names (`"package.module.function"`, `"aten::add"` for torch.add, `"cpp_function(name)"`), or prefixes
            of names (`"package.*"`, which stands for no name that begins with an underscore). Methods of objects that
            RRefs refer to may be called if their class is listed and has them from its own package, and others if their
            full names are listed (`"package.Net.state_dict"`). A RemoteModule needs its class only. Other workers may
            profile this one if `torchrpc.profiler.profile` is listed.
            Other workers may send plain data, tensors, arrays, and objects of listed classes and of those of
            `rpc.register_data_class`: no lambdas. Pickles are not read. A dict maps
            patterns of callers' names to lists, or to None for no restriction:
            `{"client-*": [infer], "trainer-*": None}`. The first pattern that matches applies, and a caller that no
            pattern matches may run nothing. A dict needs an `identity` or `tls`, by which workers prove their names.
            Default: no restriction.
        liveness_timeout (float): seconds. A worker with outstanding requests (a reply, a value, its end in `shutdown`)
            that stays silent this long counts as lost; a function may run for longer. 0: only a broken connection means
            a lost worker. Default: the environment variable TORCHRPC_LIVENESS_TIMEOUT, else 30.
        propagate_deadlines (bool): send the deadline of each call to the callee: calls that its function makes get no
            more than the remaining time.
        cancel_on_timeout (bool): a call of this worker that times out is cancelled on its callee, as by
            `Future.cancel()`. Default: True; False where torchrpc has replaced torch's RPC, whose callees go on.
        max_queued_bytes (int): bytes of calls that may wait for a thread here, and of results that may wait for one
            caller, before callers are held up. Default: the environment variable TORCHRPC_MAX_QUEUED_BYTES, else 256
            MiB.
        idempotency_window (float): seconds after the answer to a call with an `idempotency_key` in which this worker
            does not run it again. Default: the environment variable TORCHRPC_IDEMPOTENCY_WINDOW, else 600.
        metrics (bool): count calls by function and peer, with their latencies: see `torchrpc.observe`. Default: the
            environment variable TORCHRPC_METRICS (0 or 1), else False.
        slow_call_s (float): seconds. Calls that take longer, made or served by this worker, are logged with their
            function and the other worker, once while they are under way and again when they have ended; 0: none.
            Default: the environment variable TORCHRPC_SLOW_CALL_S, else none.
        pickle (str): `"off"`: this worker neither writes nor reads pickles. Plain data, tensors, arrays, RRefs,
            collections, functions and classes by their names, and objects of classes in `allowed_functions` or of
            `rpc.register_data_class` can be sent; other arguments and results raise a SerializationError that names
            them. Exceptions keep their type if it is one of Python's or torchrpc's, or of such a class. All workers of
            a group need the same value.
            Default: the environment variable TORCHRPC_PICKLE, else `"on"`.
        limits (Limits): the largest messages that this worker sends and receives, e.g. `Limits(message_bytes=1 << 30)`.
            Default: 1 TiB.
        quotas (dict): names or patterns of callers -> Quota, e.g. `{"client-*": Quota(calls=64, bytes=1 << 30)}`: how
            much of this worker each of these callers may use at a time. The first pattern (`*`, `?`, `[a-z]`) that
            matches a caller's name applies. Default: no quotas.
        max_calls (int): how many calls this worker serves at a time, of all callers together. Further calls raise a
            QuotaExceededError at their callers. Default: no limit.
        health (HealthOptions): health checks over HTTP, e.g. `HealthOptions(address=8080)`. Default: none.
        audit_log (str, path, logging.Logger or function): where to record each call that this worker serves for others,
            or refuses: a file that only its owner can read, to which lines of JSON are appended; a logger, which gets
            the same lines; or a function, which gets a dict for each call, on its own thread. The keys are `time`,
            `worker`, `caller`, `action`, `function`, `outcome` ("ok", "error" or "refused"), `error`, `reason`,
            `request_bytes`, `reply_bytes` and `seconds`; for a call that may be repeated, also `attempt`, `repeat` and
            `key`. Calls do not wait for the log: if events come faster than they can be written, some are dropped, and
            `dropped_events` says how many. Default: no log.
        _transports, _channels (list of str): names of TensorPipe's transports and channels. With "shm" in `_transports`
            workers of one host share memory; with "uv" or "ibv" only, all use TCP. With transport="tensorpipe": in
            order of preference; those that do not work on this machine are skipped with a warning.

    Raises:
        ValueError: a device map that is not 1-to-1, the CPU in `devices`, an empty secret, or an unknown word for
            `device_maps` or `encryption`.
        TypeError: an argument of another type.
        RuntimeError: a number that must be positive and is not, or a limit that is too small for the group's own
            messages.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: dict[str, dict[DeviceType, DeviceType]] | str | None = None,
        devices: list[DeviceType] | None = None,
        share_device_tensors: bool = False,
        transport: str | None = None,
        secret: str | bytes | None = None,
        identity: str | os.PathLike[str] | None = None,
        tls: TlsOptions | None = None,
        encryption: str | None = None,
        port: int | str | None = None,
        allowed_functions: Entries | Mapping[str, Entries | None] | None = None,
        liveness_timeout: float | None = None,
        propagate_deadlines: bool = False,
        cancel_on_timeout: bool | None = None,
        max_queued_bytes: int | None = None,
        idempotency_window: float | None = None,
        metrics: bool | None = None,
        slow_call_s: float | None = None,
        pickle: str | None = None,
        limits: Limits | None = None,
        quotas: Mapping[str, Quota] | None = None,
        max_calls: int | None = None,
        health: HealthOptions | None = None,
        audit_log: AuditLogType | None = None,
        _transports: list[str] | None = None,
        _channels: list[str] | None = None,
    ) -> None:
        for name, value, kind, what in (
            ("num_worker_threads", num_worker_threads, numbers.Integral, "an int"),
            ("rpc_timeout", rpc_timeout, numbers.Real, "a number of seconds"),
            ("init_method", init_method, str, "a str"),
            ("device_maps", device_maps, Mapping | str | None, 'a dict or "identity"'),
            ("share_device_tensors", share_device_tensors, bool, "a bool"),
            ("transport", transport, str | None, "a str"),
            ("identity", identity, str | os.PathLike | None, "a path"),
            ("encryption", encryption, str | None, "a str"),
            ("port", port, numbers.Integral | str | None, "an int or a str"),
            ("liveness_timeout", liveness_timeout, numbers.Real | None, "a number of seconds"),
            ("propagate_deadlines", propagate_deadlines, bool, "a bool"),
            ("cancel_on_timeout", cancel_on_timeout, bool | None, "a bool"),
            ("max_queued_bytes", max_queued_bytes, numbers.Integral | None, "an int"),
            ("idempotency_window", idempotency_window, numbers.Real | None, "a number of seconds"),
            ("metrics", metrics, bool | None, "a bool"),
            ("slow_call_s", slow_call_s, numbers.Real | None, "a number of seconds"),
            ("pickle", pickle, str | None, "a str"),
            ("max_calls", max_calls, numbers.Integral | None, "an int"),
            ("health", health, HealthOptions | None, "a HealthOptions"),
            ("_transports", _transports, Sequence | None, "a list of str"),
            ("_channels", _channels, Sequence | None, "a list of str"),
        ):
            if not isinstance(value, kind):
                raise TypeError(
                    f"TensorPipeRpcBackendOptions(): incompatible constructor arguments: {name} must be {what}, but is "
                    f"a {type(value).__name__}: {value!r}."
                )
        _check_names("transport", _transports, _TRANSPORTS)
        _check_names("channel", _channels, _CHANNELS)
        if num_worker_threads < 1:
            raise RuntimeError(f"num_worker_threads must be positive, but got {num_worker_threads}")
        if max_calls is not None and max_calls < 1:
            raise RuntimeError(f"max_calls must be positive, but got {max_calls}")
        audit_path, audit_function = audit_target(audit_log)
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            device_maps=_to_device_maps(device_maps),
            maps_to_same_device=device_maps == "identity",
            devices=_to_device_list(devices or []),
            share_device_tensors=share_device_tensors,
            transport=transport or "",
            secret=_checked_secret(secret),
            identity="" if identity is None else os.fspath(identity),
            tls=tls_texts(tls),
            encryption=_checked_encryption(encryption),
            port="" if port is None else str(port),
            allowed=allowances_of(allowed_functions),
            liveness_timeout=liveness_timeout,
            propagate_deadlines=propagate_deadlines,
            cancel_on_timeout=not replaces_torch() if cancel_on_timeout is None else cancel_on_timeout,
            max_queued_bytes=max_queued_bytes,
            idempotency_window=idempotency_window,
            metrics=metrics,
            slow_call_s=slow_call_s,
            uses_pickles=_uses_pickles(pickle),
            limits=limit_numbers(limits),
            quotas=quota_numbers(quotas),
            max_calls=max_calls,
            health_address="" if health is None else str(health.address),
            health_check=None if health is None else health.check,
            audit_path=audit_path,
            audit_function=audit_function,
            _transports=_transports,
            _channels=_channels,
        )
        self._limits, self._quotas, self._audit_log, self._tls = limits, dict(quotas or {}), audit_log, tls
        self._health = health

    @property
    def tls(self) -> TlsOptions | None:
        """The TLS options that were given."""
        return self._tls

    @property
    def limits(self) -> Limits | None:
        """The limits that were given."""
        return self._limits

    @property
    def quotas(self) -> dict[str, Quota]:
        """The quotas that were given."""
        return dict(self._quotas)

    @property
    def health(self) -> HealthOptions | None:
        """The options of health checks that were given."""
        return self._health

    @property
    def audit_log(self) -> AuditLogType | None:
        """The audit log that was given."""
        return self._audit_log

    @property
    def pickle(self) -> str:
        """`"off"` if this worker neither writes nor reads pickles, else `"on"`."""
        return "on" if self._uses_pickles else "off"

    @property
    def allowed_functions(self) -> list[str] | dict[str, list[str] | None] | None:
        """The names of the functions that callers may run here; None: all functions."""
        if not self._allowed:
            return None
        if [callers for callers, _ in self._allowed] == ["*"]:
            return self._allowed[0][1]
        return dict(self._allowed)

    def __repr__(self) -> str:
        """Return the options that differ from their defaults, without secret and port, which have no attributes."""
        default, shown = TensorPipeRpcBackendOptions(), []
        for name in inspect.signature(TensorPipeRpcBackendOptions).parameters:
            value = getattr(self, name, None)
            if value != getattr(default, name, None):
                shown.append(f"{name}={value!r}")
        return f"TensorPipeRpcBackendOptions({', '.join(shown)})"

    def set_device_map(self, to: str, device_map: dict[DeviceType, DeviceType]) -> None:
        """Add entries to the map {device here: device there} for calls to the worker named `to`.

        Replies use the inverse map. May be called several times, before `init_rpc`.

        Raises:
            ValueError: the map, with the earlier ones, is not 1-to-1.
        """
        added = _to_device_map(device_map)
        current = self.device_maps.get(to, {})
        for source, target in added.items():
            if current.get(source, target) != target:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target} and "
                    f"{current[source]}"
                )
        self._set_device_map(to, added)

    def set_devices(self, devices: list[DeviceType]) -> None:
        """Set the devices of an accelerator that this worker uses. Functions that it serves have their own streams.

        Raises:
            ValueError: a device is the CPU.
        """
        self.devices = _to_device_list(devices)
