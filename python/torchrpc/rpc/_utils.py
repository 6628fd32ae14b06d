"""Joining and leaving a group that has no fixed size: one worker at a time, by a token in the store."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed import DistNetworkError, Store

from torchrpc._C import WorkerInfo, _get_current_rpc_agent

_TOKEN = "RpcGroupManagementToken"
_LOOK_AGAIN = 0.01  # s


@contextlib.contextmanager
def _group_membership_management(store: Store, name: str, is_join: bool) -> Iterator[None]:
    """Hold the token while the block runs; waits for its holder, at most the store's timeout.

    The token is given back if the block fails, too, so that one worker's error does not stop all others. Who leaves a
    group whose store is gone (with the process of rank 0, say) does so without a token: nobody can join it any more.

    Raises:
        RuntimeError: the holder did not give it back in time.
    """
    ignored = () if is_join else (DistNetworkError,)
    with contextlib.suppress(*ignored):
        _take_token(store, f"{name}, to {'join' if is_join else 'leave'}")
    try:
        yield
    finally:
        with contextlib.suppress(*ignored):
            store.set(_TOKEN, "")


def _take_token(store: Store, mine: str) -> None:
    # Not store.wait(): it bars the store for all threads, those that serve the holder included, and another connection
    # takes a minute to learn that the store has gone.
    end = time.monotonic() + store.timeout.total_seconds()
    while (holder := store.compare_set(_TOKEN, "", mine).decode()) != mine:
        if time.monotonic() > end:
            raise RuntimeError(
                f"{mine} the group, waited {store.timeout.total_seconds():g} s for the turn of {holder}, to end. "
                "If that worker is dead, start the group anew; else allow more time by rpc_timeout."
            )
        time.sleep(_LOOK_AGAIN)


def _update_group_membership(worker_info: WorkerInfo, my_devices: list, reverse_device_map: dict, is_join: bool) -> Any:
    """Runs on every member when `worker_info` comes or goes."""
    agent = _get_current_rpc_agent()
    return agent._update_group_membership(worker_info, my_devices, reverse_device_map, is_join)
