"""The API of `torch.distributed.rpc`, with the same names, signatures, exceptions and message texts.

This module is lazy: the first use of a name loads the extension and the modules beside this one. So `_install` can put
it in torch's place at no cost for a process that never makes a call.
"""

import atexit
import importlib
import logging
import sys
from typing import Any

import torch  # noqa: F401  loads the libraries that the extension is linked with

_EXPORTS = {
    "torchrpc._C": (
        "PyRRef RemoteProfilerManager RpcAgent RpcBackendOptions TensorPipeAgent WorkerInfo enable_gil_profiling "
        "_DEFAULT_INIT_METHOD _DEFAULT_NUM_WORKER_THREADS _DEFAULT_RPC_TIMEOUT_SEC _UNSET_RPC_TIMEOUT "
        "_TensorPipeRpcBackendOptionsBase _cleanup_python_rpc_handler _delete_all_user_and_unforked_owner_rrefs "
        "_destroy_rref_context _get_current_rpc_agent _disable_jit_rref_pickle _disable_server_process_global_profiler "
        "_enable_jit_rref_pickle _enable_server_process_global_profiler "
        "_is_current_rpc_agent_set _reset_current_rpc_agent _rref_context_get_debug_info "
        "_set_and_start_rpc_agent _set_profiler_node_id _set_rpc_timeout get_rpc_timeout"
    ),
    "torchrpc.rpc.api": (
        "AllGatherStates RRef get_worker_info get_worker_infos remote rpc_async rpc_sync shutdown _get_debug_info "
        "_wait_all"
    ),
    "torchrpc.rpc._absent": (
        "_invoke_remote_builtin _invoke_remote_python_udf _invoke_remote_torchscript "
        "_invoke_rpc_builtin _invoke_rpc_python_udf _invoke_rpc_torchscript"
    ),
    "torchrpc.rpc._calls.batching": "batched",
    "torchrpc.rpc._errors": (
        "ArgumentMismatchError CancelledError NameNotFoundError NotAllowedError QuotaExceededError RemoteException "
        "RendezvousError RpcError RpcTimeoutError SerializationError ShutdownError WorkerLostError"
    ),
    "torchrpc.rpc._calls.futures": "Future",
    "torchrpc.rpc._values.plain_objects": "register_data_class",
    "torchrpc.rpc._health": "HealthOptions",
    "torchrpc.rpc._security.limits": "Limits Quota",
    "torchrpc.rpc._group.members": "get_workers on_member_change",
    "torchrpc.rpc._calls.retries": "RetryPolicy",
    "torchrpc.rpc._security.tls": "TlsOptions",
    "torchrpc.rpc._calls.waiting": "wait",
    "torchrpc.rpc.backend_registry": (
        "BackendValue backend_registered construct_rpc_backend_options init_backend register_backend"
    ),
    "torchrpc.rpc._group.init": "init_rpc _init_rpc_backend _is_tensorpipe_available _validate_rpc_args",
    "torchrpc.rpc.options": "TensorPipeRpcBackendOptions",
    "torchrpc.rpc.server_process_global_profiler": "_server_process_global_profile",
}
logger = logging.getLogger(__name__)  # its children are the loggers of the modules
_SUBMODULES = "api backend_registry constants functions internal options rref_proxy server_process_global_profiler"


def is_available() -> bool:
    """Whether this build has RPC; always true."""
    return True


def _leave_at_exit() -> None:
    if api := sys.modules.get(f"{__name__}.api"):
        api._leave_at_exit()
        importlib.import_module("torchrpc._C")._end_log()


atexit.register(_leave_at_exit)  # registered early: runs after the program's exit functions, which may call shutdown()


def _load() -> None:
    namespace = globals()
    for module, names in _EXPORTS.items():
        loaded = importlib.import_module(module)
        namespace.update((name, getattr(loaded, name)) for name in names.split())
    for name in _SUBMODULES.split():
        importlib.import_module(f"{__name__}.{name}")
    importlib.import_module("torchrpc.rpc._logging").configure()
    importlib.import_module("torchrpc.rpc._calls.futures").extend_futures()
    namespace["__all__"] = [name for name in __dir__() if not name.startswith("_")]
    importlib.import_module("torchrpc._install").on_load()


def __dir__() -> list[str]:
    names = {"BackendType", "Backend", "is_available", *_SUBMODULES.split()}
    return sorted(names.union(*(exported.split() for exported in _EXPORTS.values())))


def __getattr__(name: str) -> Any:
    if name in ("BackendType", "Backend"):
        # Not cached: register_backend() makes a new enum.
        return importlib.import_module("torchrpc.rpc.backend_registry").BackendType
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if submodule := sys.modules.get(f"{__name__}.{name}"):  # its import may be under way
        return submodule
    if "__all__" not in globals():
        _load()
    try:
        return globals()[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
