# The names that __init__.py adds on first use; test_stubs.py compares the two.
import logging
from typing import Any

from torchrpc._C import (
    _DEFAULT_INIT_METHOD as _DEFAULT_INIT_METHOD,
)
from torchrpc._C import (
    _DEFAULT_NUM_WORKER_THREADS as _DEFAULT_NUM_WORKER_THREADS,
)
from torchrpc._C import (
    _DEFAULT_RPC_TIMEOUT_SEC as _DEFAULT_RPC_TIMEOUT_SEC,
)
from torchrpc._C import (
    _UNSET_RPC_TIMEOUT as _UNSET_RPC_TIMEOUT,
)
from torchrpc._C import (
    PyRRef as PyRRef,
)
from torchrpc._C import (
    RemoteProfilerManager as RemoteProfilerManager,
)
from torchrpc._C import (
    RpcAgent as RpcAgent,
)
from torchrpc._C import (
    RpcBackendOptions as RpcBackendOptions,
)
from torchrpc._C import (
    TensorPipeAgent as TensorPipeAgent,
)
from torchrpc._C import (
    WorkerInfo as WorkerInfo,
)
from torchrpc._C import (
    _cleanup_python_rpc_handler as _cleanup_python_rpc_handler,
)
from torchrpc._C import (
    _delete_all_user_and_unforked_owner_rrefs as _delete_all_user_and_unforked_owner_rrefs,
)
from torchrpc._C import (
    _destroy_rref_context as _destroy_rref_context,
)
from torchrpc._C import (
    _disable_jit_rref_pickle as _disable_jit_rref_pickle,
)
from torchrpc._C import (
    _disable_server_process_global_profiler as _disable_server_process_global_profiler,
)
from torchrpc._C import (
    _enable_jit_rref_pickle as _enable_jit_rref_pickle,
)
from torchrpc._C import (
    _enable_server_process_global_profiler as _enable_server_process_global_profiler,
)
from torchrpc._C import (
    _get_current_rpc_agent as _get_current_rpc_agent,
)
from torchrpc._C import (
    _is_current_rpc_agent_set as _is_current_rpc_agent_set,
)
from torchrpc._C import (
    _reset_current_rpc_agent as _reset_current_rpc_agent,
)
from torchrpc._C import (
    _rref_context_get_debug_info as _rref_context_get_debug_info,
)
from torchrpc._C import (
    _set_and_start_rpc_agent as _set_and_start_rpc_agent,
)
from torchrpc._C import (
    _set_profiler_node_id as _set_profiler_node_id,
)
from torchrpc._C import (
    _set_rpc_timeout as _set_rpc_timeout,
)
from torchrpc._C import (
    _TensorPipeRpcBackendOptionsBase as _TensorPipeRpcBackendOptionsBase,
)
from torchrpc._C import (
    enable_gil_profiling as enable_gil_profiling,
)
from torchrpc._C import (
    get_rpc_timeout as get_rpc_timeout,
)

from . import (
    api as api,
)
from . import (
    backend_registry as backend_registry,
)
from . import (
    constants as constants,
)
from . import (
    functions as functions,
)
from . import (
    internal as internal,
)
from . import (
    options as options,
)
from . import (
    rref_proxy as rref_proxy,
)
from . import (
    server_process_global_profiler as server_process_global_profiler,
)
from ._absent import (
    _invoke_remote_builtin as _invoke_remote_builtin,
)
from ._absent import (
    _invoke_remote_python_udf as _invoke_remote_python_udf,
)
from ._absent import (
    _invoke_remote_torchscript as _invoke_remote_torchscript,
)
from ._absent import (
    _invoke_rpc_builtin as _invoke_rpc_builtin,
)
from ._absent import (
    _invoke_rpc_python_udf as _invoke_rpc_python_udf,
)
from ._absent import (
    _invoke_rpc_torchscript as _invoke_rpc_torchscript,
)
from ._calls.batching import (
    batched as batched,
)
from ._calls.futures import (
    Future as Future,
)
from ._calls.retries import (
    RetryPolicy as RetryPolicy,
)
from ._calls.waiting import (
    wait as wait,
)
from ._errors import (
    ArgumentMismatchError as ArgumentMismatchError,
)
from ._errors import (
    CancelledError as CancelledError,
)
from ._errors import (
    NameNotFoundError as NameNotFoundError,
)
from ._errors import (
    NotAllowedError as NotAllowedError,
)
from ._errors import (
    QuotaExceededError as QuotaExceededError,
)
from ._errors import (
    RemoteException as RemoteException,
)
from ._errors import (
    RendezvousError as RendezvousError,
)
from ._errors import (
    RpcError as RpcError,
)
from ._errors import (
    RpcTimeoutError as RpcTimeoutError,
)
from ._errors import (
    SerializationError as SerializationError,
)
from ._errors import (
    ShutdownError as ShutdownError,
)
from ._errors import (
    WorkerLostError as WorkerLostError,
)
from ._group.init import (
    _init_rpc_backend as _init_rpc_backend,
)
from ._group.init import (
    _is_tensorpipe_available as _is_tensorpipe_available,
)
from ._group.init import (
    _validate_rpc_args as _validate_rpc_args,
)
from ._group.init import (
    init_rpc as init_rpc,
)
from ._group.members import (
    get_workers as get_workers,
)
from ._group.members import (
    on_member_change as on_member_change,
)
from ._health import (
    HealthOptions as HealthOptions,
)
from ._security.limits import (
    Limits as Limits,
)
from ._security.limits import (
    Quota as Quota,
)
from ._security.tls import (
    TlsOptions as TlsOptions,
)
from ._values.plain_objects import (
    register_data_class as register_data_class,
)
from .api import (
    AllGatherStates as AllGatherStates,
)
from .api import (
    RRef as RRef,
)
from .api import (
    _get_debug_info as _get_debug_info,
)
from .api import (
    _wait_all as _wait_all,
)
from .api import (
    get_worker_info as get_worker_info,
)
from .api import (
    get_worker_infos as get_worker_infos,
)
from .api import (
    remote as remote,
)
from .api import (
    rpc_async as rpc_async,
)
from .api import (
    rpc_sync as rpc_sync,
)
from .api import (
    shutdown as shutdown,
)
from .backend_registry import (
    BackendValue as BackendValue,
)
from .backend_registry import (
    backend_registered as backend_registered,
)
from .backend_registry import (
    construct_rpc_backend_options as construct_rpc_backend_options,
)
from .backend_registry import (
    init_backend as init_backend,
)
from .backend_registry import (
    register_backend as register_backend,
)
from .options import (
    TensorPipeRpcBackendOptions as TensorPipeRpcBackendOptions,
)
from .server_process_global_profiler import (
    _server_process_global_profile as _server_process_global_profile,
)

logger: logging.Logger
Backend: Any
BackendType: Any

def is_available() -> bool: ...
