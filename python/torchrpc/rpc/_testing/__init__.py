"""Registers the backend FAULTY_TENSORPIPE when imported: TENSORPIPE with injected failures and delays of messages.

For tests of programs under faults:

    >>> import torchrpc.rpc._testing
    >>> backend = rpc.backend_registry.BackendType.FAULTY_TENSORPIPE
    >>> options = rpc.backend_registry.construct_rpc_backend_options(
    ...     backend, messages_to_fail=["PYTHON_REMOTE_CALL"], messages_to_delay={"SCRIPT_CALL": 1.5}, num_fail_sends=1
    ... )
    >>> rpc.init_rpc("worker0", backend=backend, rank=0, world_size=2, rpc_backend_options=options)
"""

from torchrpc._C import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions

from . import faulty_agent_backend_registry as faulty_agent_backend_registry

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "is_available"]


def is_available() -> bool:
    """Whether the backend is available; always true."""
    return True
