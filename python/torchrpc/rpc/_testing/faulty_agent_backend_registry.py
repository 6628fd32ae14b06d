"""The backend FAULTY_TENSORPIPE; see the package."""

from collections.abc import Iterable
from typing import Any

from torchrpc._C import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions
from torchrpc.rpc import backend_registry
from torchrpc.rpc.constants import DEFAULT_NUM_WORKER_THREADS


def _faulty_tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
    messages_to_fail: Iterable[str] = (),
    messages_to_delay: dict[str, float] | None = None,
    num_fail_sends: int = 0,
    **kwargs: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads, rpc_timeout, init_method, list(messages_to_fail), messages_to_delay or {}, num_fail_sends
    )


_faulty_tensorpipe_init_backend_handler = backend_registry._init_handler(
    FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions
)
backend_registry.register_backend(
    "FAULTY_TENSORPIPE",
    _faulty_tensorpipe_construct_rpc_backend_options_handler,
    _faulty_tensorpipe_init_backend_handler,
)
