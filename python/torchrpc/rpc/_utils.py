"""Joining and leaving a group that has no fixed size: one worker at a time, by a token in the store."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch.distributed import DistNetworkError, Store

from torchrpc._C import WorkerInfo, _get_current_rpc_agent

logger = logging.getLogger(__name__)

_TOKEN = "RpcGroupManagementToken"


@contextlib.contextmanager
def _group_membership_management(store: Store, name: str, is_join: bool) -> Iterator[None]:
    """Hold the token while the block runs; waits for its holder, at most the store's timeout.

    The token is given back if the block fails, too, so that one worker's error does not stop all others. Who leaves a
    group whose store is gone (with the process of rank 0, say) does so without a token: nobody can join it any more.

    Raises:
        RuntimeError: the holder did not give it back in time.
    """
    mine = f"Token_for_{name}_{'join' if is_join else 'leave'}"
    ignored = () if is_join else (DistNetworkError,)
    with contextlib.suppress(*ignored):
        _take_token(store, mine)
    try:
        yield
    finally:
        with contextlib.suppress(*ignored):
            store.set(_TOKEN, "")
            store.set(mine, "Done")  # wakes those that wait for this holder


def _of_its_own(store: Store) -> Store:
    """Another connection to it: who waits on one bars it for all threads, those that serve the holder included."""
    other = store.clone()
    other.set_timeout(store.timeout)
    return other


def _take_token(store: Store, mine: str) -> None:
    while (holder := store.compare_set(_TOKEN, "", mine).decode()) != mine:
        try:
            _of_its_own(store).wait([holder])
        except DistNetworkError:
            raise
        except RuntimeError:
            logger.error("%s waited too long for %s, which holds the token of the group's membership.", mine, holder)
            raise
    store.delete_key(mine)  # left from an earlier time, it would make waiters spin


def _update_group_membership(worker_info: WorkerInfo, my_devices: list, reverse_device_map: dict, is_join: bool) -> Any:
    """Runs on every member when `worker_info` comes or goes."""
    agent = _get_current_rpc_agent()
    return agent._update_group_membership(worker_info, my_devices, reverse_device_map, is_join)
