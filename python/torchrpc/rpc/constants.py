"""Default values, mostly the core's own. Times are in seconds."""

from datetime import timedelta

from torchrpc._C import (
    _DEFAULT_INIT_METHOD,
    _DEFAULT_NUM_WORKER_THREADS,
    _DEFAULT_RPC_TIMEOUT_SEC,
    _UNSET_RPC_TIMEOUT,
)

DEFAULT_RPC_TIMEOUT_SEC: float = _DEFAULT_RPC_TIMEOUT_SEC
DEFAULT_INIT_METHOD: str = _DEFAULT_INIT_METHOD
DEFAULT_NUM_WORKER_THREADS: int = _DEFAULT_NUM_WORKER_THREADS
DEFAULT_SHUTDOWN_TIMEOUT: float = 0  # no limit
DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(milliseconds=2**31 - 1)  # the longest that gloo accepts
UNSET_RPC_TIMEOUT: float = _UNSET_RPC_TIMEOUT  # stands for the group's time-out

__all__: list[str] = []
