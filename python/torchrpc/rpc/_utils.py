"""How workers join and leave a group without a fixed size: one worker at a time, the holder of a token in the store."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed import DistError, Store

from torchrpc._C import WorkerInfo, _get_current_rpc_agent

from ._calls.checks import check_caller
from ._errors import RendezvousError
from ._group.rendezvous import limited_requests

_TOKEN = "RpcGroupManagementToken"
_TOKEN_POLL_S = 0.01


@contextlib.contextmanager
def _group_membership_management(store: Store, name: str, is_join: bool, limit_s: float = math.inf) -> Iterator[None]:
    """Hold the token while the block runs; wait for its present holder for at most `limit_s` and the store's timeout.

    The token is returned even if the block fails, so that the error of one worker does not stop all others. A worker
    leaves without the token if the store does not answer, for example because its process (rank 0) has ended: no worker
    can join that group any more.

    Raises:
        RendezvousError: the holder did not return the token in time.
    """
    ignored = () if is_join else (DistError,)
    has_token = False
    wait_s = min(store.timeout.total_seconds(), limit_s)
    with contextlib.suppress(*ignored), limited_requests(store, limit_s / 2):
        _take_token(store, f"{name}, to {'join' if is_join else 'leave'}", wait_s)
        has_token = True
    try:
        yield
    finally:
        if has_token:
            with contextlib.suppress(*ignored), limited_requests(store, limit_s / 2):
                store.set(_TOKEN, "")


def _take_token(store: Store, mine: str, timeout_s: float) -> None:
    # store.wait() would block the store for all threads, also for those that serve the holder, and a second connection
    # takes a minute to notice that the store's process has ended.
    deadline = time.monotonic() + timeout_s
    while (holder := store.compare_set(_TOKEN, "", mine).decode()) != mine:
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"{mine} the group, waited {timeout_s:g} s for the token held by {holder}. "
                "If that worker is dead, start a new group; otherwise increase rpc_timeout."
            )
        time.sleep(_TOKEN_POLL_S)


def _update_group_membership(worker_info: WorkerInfo, my_devices: list, reverse_device_map: dict, is_join: bool) -> Any:
    """Record that the worker `worker_info` joins or leaves. That worker calls it on every member.

    The devices and maps are torch's parameters, and have no effect: members read them from the worker's record in the
    store.

    Raises:
        NotAllowedError: another worker has called it.
        RendezvousError: the store has no such record of the worker that joins.
        RuntimeError: its devices and maps do not fit those of this worker.
    """
    check_caller(worker_info.id)
    agent = _get_current_rpc_agent()
    if agent.is_static_group:
        raise RendezvousError(f"{worker_info.name} cannot join or leave a group of a fixed size.")
    if not is_join and agent.get_worker_info(worker_info.id) != worker_info:
        raise RendezvousError(f"{worker_info.name} is not the name of the worker with id {worker_info.id}.")
    return agent._update_group_membership(worker_info, my_devices, reverse_device_map, is_join)
