"""The living members of the group, and callbacks when members change. Any thread may call these functions."""

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from torchrpc._C import TensorPipeAgent, WorkerInfo, _get_current_rpc_agent, _is_current_rpc_agent_set

from .._calls.checks import _check_initialized

logger = logging.getLogger(__name__)

_lock = threading.Lock()  # guards _callbacks and _attached
_callbacks: list[Callable[[WorkerInfo, str], Any]] = []
_attached: Any = None  # the agent that calls _report()


def get_workers() -> list[WorkerInfo]:
    """Return names and ids of the living workers of the group, ordered by id, this one included.

    The list omits workers that this worker knows to be lost, or to have left. A worker notices the end only of workers
    to which it has a connection; with a callback of `on_member_change` it has a connection to all. `get_worker_infos`
    also returns lost workers. Nothing is sent.

    Raises:
        ShutdownError: RPC is not initialized.
    """
    _check_initialized()
    agent = _get_current_rpc_agent()
    workers = agent._living_workers() if isinstance(agent, TensorPipeAgent) else agent.get_worker_infos()
    return sorted(workers, key=lambda info: info.id)


def on_member_change(callback: Callable[[WorkerInfo, str], Any]) -> Callable[[], None]:
    """Call `callback(worker, change)` at each change of another worker; return a function that removes the callback.

    Args:
        callback (Callable): called with a WorkerInfo and one of

            - `"joined"`: the worker has joined a group without a fixed size, or was lost and can be reached again.
            - `"lost"`: its process has ended, or it was silent for `liveness_timeout`.
            - `"replaced"`: it has been started again under its name and rank. The values that its earlier process owned
              are lost; calls reach the new process from now on.
            - `"left"`: it has called `shutdown` while this worker goes on.

    The callback runs on a thread of the worker's pool, one call at a time, in the order of the changes as this worker
    sees them. It may make calls, and delays only later callbacks. An exception that it raises is logged. Changes while
    this worker shuts down are not reported.

    Register a callback before `init_rpc` or later; it stays registered for later groups of the process. A worker with a
    callback opens a connection to every member, so that it notices the end of each.

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
    """Forget the agent when it ends."""
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
    """Replace the lock in a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()
    detach()


os.register_at_fork(after_in_child=_forget_parent)
