"""Who is in the group now, and callbacks when that changes. Any thread calls these functions."""

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from torchrpc._C import TensorPipeAgent, WorkerInfo, _get_current_rpc_agent, _is_current_rpc_agent_set

from ._checks import _check_initialized

logger = logging.getLogger(__name__)

_lock = threading.Lock()  # guards the two below
_callbacks: list[Callable[[WorkerInfo, str], Any]] = []
_attached: Any = None  # the agent that calls _report()


def get_workers() -> list[WorkerInfo]:
    """Return names and ids of the workers of the group that are alive, by id, this one included.

    Workers that have been lost, or have left, are missing, as far as this worker knows: it notices the end of workers
    to which it has a connection; with `on_member_change` those are all. `get_worker_infos` returns the lost ones, too.
    Nothing is sent.

    Raises:
        ShutdownError: RPC is not initialized.
    """
    _check_initialized()
    agent = _get_current_rpc_agent()
    workers = agent._living_workers() if isinstance(agent, TensorPipeAgent) else agent.get_worker_infos()
    return sorted(workers, key=lambda info: info.id)


def on_member_change(callback: Callable[[WorkerInfo, str], Any]) -> Callable[[], None]:
    """Call `callback(worker, change)` each time that another worker of the group changes; return what ends that.

    Args:
        callback (Callable): called with a WorkerInfo and one of

            - `"joined"`: a new member of a group without a fixed size; or one that was lost can be reached again.
            - `"lost"`: its process has ended, or it is silent for `liveness_timeout`.
            - `"replaced"`: it has been started again under its name and rank. What its earlier process owned is lost;
              calls reach the new one from now on.
            - `"left"`: it has called `shutdown` while this worker goes on.

    The callback runs on a thread of the worker's pool, one call at a time, in the order of the changes as this worker
    sees them. It may make calls, and delays nothing but later callbacks. An exception that it raises is logged. Changes
    while this worker shuts down are not reported.

    Register before `init_rpc` or later; a callback stays registered for later groups of the process. This worker then
    opens a connection to every member, so that it notices the end of each.

    Example:
        >>> remove = torchrpc.on_member_change(lambda worker, change: print(worker.name, change))
        >>> remove()
    """
    if not callable(callback):
        raise TypeError(f"callback must be callable with a WorkerInfo and a str, but is a {type(callback).__name__}.")
    with _lock:
        _callbacks.append(callback)
    if _is_current_rpc_agent_set():
        attach(_get_current_rpc_agent())

    def remove() -> None:
        with _lock:
            if callback in _callbacks:
                _callbacks.remove(callback)

    return remove


def attach(agent: Any) -> None:
    """Have the agent report changes, if there are callbacks."""
    global _attached
    with _lock:
        if not _callbacks or agent is _attached or not isinstance(agent, TensorPipeAgent):
            return
        _attached = agent
    agent._on_member_change(_report)


def detach() -> None:
    """Drop the agent at its end."""
    global _attached
    with _lock:
        _attached = None


def _report(worker: WorkerInfo, change: str) -> None:
    with _lock:
        callbacks = list(_callbacks)
    for callback in callbacks:
        try:
            callback(worker, change)
        except Exception:
            logger.exception("A callback of on_member_change raised when %s was %s", worker.name, change)


def _forget_parent() -> None:
    """In a forked child: another thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()
    detach()


os.register_at_fork(after_in_child=_forget_parent)
