"""Workers, RRefs, calls and the end of a group, under the names of upstream's module.

Scripts and upstream's tests replace names of this module (`api._all_gather`, `api._ignore_rref_leak` …). So functions
here look up each other, and the extension's functions, in this module each time. The modules `_calls`, `_gather` and
`_shutdown` do the work and do not import this one.
"""

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from torchrpc._C import (
    PyRRef,
    TensorPipeAgent,
    WorkerInfo,
    _caller,
    _cleanup_python_rpc_handler,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _serves_call,
    _set_and_start_rpc_agent,
    get_rpc_timeout,
)

from . import _calls, _gather
from ._allow_list import local_value
from ._calls import _wait_all as _wait_all
from ._calls import remote, rpc_async, rpc_sync
from ._checks import _check_initialized as _check_initialized
from ._checks import _to_worker_info as _to_worker_info
from ._checks import check_caller
from ._coroutines import on_event_loop, stop_event_loop
from ._errors import RpcError, WorkerLostError
from ._gather import AllGatherStates
from ._members import attach, detach, get_workers
from ._rendezvous import mark_formed
from ._shutdown import EXIT_ANSWER_S, EXIT_GRACE_S, answer_served_calls, end_static_group, stop_agent
from ._utils import _group_membership_management, _update_group_membership
from .constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from .internal import _internal_rpc_pickler

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "get_worker_infos",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger(__name__)

# False: shutdown() raises if the program still holds RRefs. They do no harm, so set it only to search for leaks.
_ignore_rref_leak = True

_default_pickler = _internal_rpc_pickler  # the extension reads it for each call
_agent_pid = 0  # the process that started the agent: a forked child inherits the agent, but must not stop it

# Upstream's names for state of the modules that do the work.
_thread_local_var = _calls.thread_local
_all_gather_dict_lock = _gather.lock
_all_gather_sequence_id = _gather.next_numbers
_all_gather_sequence_id_to_states = _gather.states_by_id

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Serialize the calls that any thread makes in the block by `rpc_pickler`, an `_InternalRPCPickler`."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _require_initialized(func: _F) -> _F:
    """Decorator: raise ShutdownError unless `init_rpc` has been called."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _check_initialized()
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


# --- Workers and references ---


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Return name and id of the worker with the given name or id; by default, of this worker.

    Any thread may call it; nothing is sent.

    Raises:
        RpcError: the group has no such worker.
        ShutdownError: RPC is not initialized.
    """
    agent = _get_current_rpc_agent()
    return agent.get_worker_info() if worker_name is None else agent.get_worker_info(worker_name)


@_require_initialized
def get_worker_infos() -> list[WorkerInfo]:
    """Return names and ids of all workers of the group, by id. Any thread may call it; nothing is sent.

    Raises:
        ShutdownError: RPC is not initialized.
    """
    return sorted(_get_current_rpc_agent().get_worker_infos(), key=lambda info: info.id)


class RRef(PyRRef, Generic[_T]):
    """A reference to a value of some type `_T` that lives on one worker, its owner.

    `RRef(value, type_hint=None)` creates a reference to a value on this worker; `remote` creates one to a value on
    another worker. RRefs can be sent only in calls and results. The owner keeps the value as long as any worker holds a
    reference. Any thread may call the methods. Methods that need the value block until it is available.

    Raises:
        ShutdownError: RPC is not initialized.
    """

    if TYPE_CHECKING:

        def __init__(self, value: _T, type_hint: Any = None) -> None: ...
        def to_here(self, timeout: float = ...) -> _T: ...
        def local_value(self) -> _T: ...


def _rref_typeof_on_owner(rref: PyRRef, blocking: bool = True) -> Any:
    """Return the type of the value; a future of it unless `blocking`."""
    kind = type(local_value(rref))
    if blocking:
        return kind
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(kind)
    return future


def _rref_typeof_on_user(rref: PyRRef, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """Ask the owner for the type of the value; return a future of it unless `blocking`."""
    future = rpc_async(rref.owner(), _rref_typeof_on_owner, args=(rref,), timeout=timeout)
    return future.wait() if blocking else future


# --- The start ---


def _init_rpc_states(agent: Any) -> None:
    """Make `agent` this process's agent and start it, unless the backend's handler has done so already."""
    global _agent_pid
    if not _is_current_rpc_agent_set():
        attach(agent)
        _set_and_start_rpc_agent(agent)
        if isinstance(agent, TensorPipeAgent) and agent.is_static_group:
            mark_formed(agent.store)
    _agent_pid = os.getpid()


# --- Gathering from all workers ---


def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: Iterable[str] | None = None) -> None:
    """Record the object of a worker. Each worker calls it on the leader."""
    if not _gather.is_own_part():
        check_caller(worker_name)
    names = worker_names or _gather.python_workers(_get_current_rpc_agent())
    _gather.record_object(sequence_id, worker_name, obj, set(names))


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any] | None) -> None:
    """Record the objects of all workers. The leader calls it on each follower when it has all objects."""
    caller = _caller()
    _gather.record_all(sequence_id, objects_map, None if caller is None else caller.name)


def _gathering_numbers(worker_name: str) -> dict[str, int]:
    """Return the numbers of the next gatherings. A restarted worker calls it on another worker."""
    check_caller(worker_name)
    return _gather.numbers_for(worker_name)


def _adopt_gatherings() -> None:
    """In a restarted worker: take part in the gatherings of the others from the next one on."""
    me = get_worker_info()
    for name in sorted({worker.name for worker in get_workers()} & _gather.python_workers(_get_current_rpc_agent())):
        if name == me.name:
            continue
        try:
            # The others report to the worker with the smallest name.
            return _gather.adopt_numbers(rpc_sync(name, _gathering_numbers, args=(me.name,)))
        except WorkerLostError:
            continue


@_require_initialized
def _all_gather(obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """Contribute `obj`. Block until all workers (of `worker_names`) have contributed; return {name: object} of all.

    Args:
        timeout (float): seconds for each message and for the wait; unset: the group's time-out for messages, no limit
            for the wait; 0: no limit for either.

    Raises:
        WorkerLostError: some workers are lost; all others have contributed by then.
        RpcTimeoutError, RpcError: time-out, or a worker that could not be reached.
    """
    agent = _get_current_rpc_agent()
    me = agent.get_worker_info().name
    message_timeout = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout

    def report(leader: str, *args: Any) -> None:
        if leader == me:
            with _gather.own_part():
                _gather_to_leader(*args)
        else:
            rpc_sync(leader, _gather_to_leader, args=args, timeout=message_timeout)

    def distribute(follower: str, *args: Any) -> torch.futures.Future:
        return rpc_async(follower, _broadcast_to_followers, args=args, timeout=message_timeout)

    names = set(worker_names or _gather.python_workers(agent))
    wait_timeout = None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    return _gather.Gathering(agent, names, message_timeout, wait_timeout, report, distribute).run(obj)


@_require_initialized
def _barrier(worker_names: Iterable[str]) -> None:
    """Block until all workers of that list have called this. Errors, such as a time-out, are logged and not raised."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Block until all workers have called this."""
    try:
        _all_gather(None, timeout=timeout)
    except WorkerLostError:
        raise  # shutdown() goes on, and names the lost workers at its end
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# --- The end ---


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group and stop RPC in this process; `init_rpc` may be called again afterwards.

    Args:
        graceful (bool): wait until all workers have called shutdown() and all work is done, and delete this worker's
            references. False: stop now. Calls that this worker serves at that moment have 5 seconds to answer; later
            calls, and calls that take longer, fail.
        timeout (float): seconds for which each step of the shutdown may wait for other workers; 0: no limit.

    Raises:
        WorkerLostError: a worker is lost; the text names it. The other workers have ended in order.
        RpcTimeoutError: a worker did not call shutdown() in time.
        ShutdownError: RPC is not initialized.
        RpcError: the thread serves a call, or, if `api._ignore_rref_leak` is False, the program still holds references.

    This worker is shut down even if `shutdown` raises an error, unless the thread serves a call: then `shutdown` only
    raises the RpcError. Only one thread may call it. It does not wait for a lost worker (see the option
    `liveness_timeout`), but it waits for a busy one, without a limit unless `timeout` is given.
    """
    if _serves_call() or on_event_loop():
        raise RpcError(
            "shutdown() cannot be called by a function that another worker has called: it would wait for that "
            "function. Let the function tell the main thread, for example by a threading.Event, and call it there."
        )
    deadline = time.monotonic() + (timeout or math.inf)
    grace_s = math.inf
    try:
        if graceful:
            _end_gracefully(timeout)
    except BaseException as exc:
        if not isinstance(exc, Exception):  # Ctrl-C: do not wait for functions that still run
            grace_s = EXIT_GRACE_S
        raise
    finally:
        _finalize_shutdown(grace_s, min(grace_s, max(deadline - time.monotonic(), 0.0)))


def _end_gracefully(timeout: float) -> None:
    agent = _get_current_rpc_agent()
    if isinstance(agent, TensorPipeAgent) and not agent.is_static_group:
        _leave_dynamic_group(agent, timeout)
    else:
        end_static_group(agent, timeout, lambda: _wait_all_workers(timeout), _delete_all_user_and_unforked_owner_rrefs)


def _leave_dynamic_group(agent: TensorPipeAgent, timeout: float) -> None:
    """Tell the other members of a group without a fixed size that this worker leaves."""
    me = agent.get_worker_info()
    with _group_membership_management(agent.store, me.name, False):
        for worker in agent.get_worker_infos():
            if worker.name != me.name:
                try:
                    rpc_sync(worker.name, _update_group_membership, args=(me, [], {}, False))
                except RuntimeError as exc:  # that worker may have ended
                    logger.warning("%s could not tell %s that it leaves the group: %s", me.name, worker.name, exc)
        agent.join(shutdown=True, timeout=timeout)


def _finalize_shutdown(grace_s: float = math.inf, limit_s: float = math.inf) -> None:
    try:
        try:
            answer_served_calls(_get_current_rpc_agent(), limit_s)  # first, because their functions may use RRefs
        except BaseException:
            grace_s = EXIT_GRACE_S
            raise
        _destroy_rref_context(_ignore_rref_leak)
    finally:
        _drop_agent(grace_s)


def _drop_agent(grace_s: float = math.inf) -> None:
    """Stop the agent and delete all state of its group, so that the next group starts afresh.

    Blocks until functions that other workers called here have returned, for at most `grace_s` seconds or until Ctrl-C.
    """
    agent = _get_current_rpc_agent()
    try:
        stop_event_loop()
        stop_agent(agent, grace_s)
    finally:
        _cleanup_python_rpc_handler()
        detach()
        _reset_current_rpc_agent()
        _gather.forget_all()


def _leave_at_exit() -> None:
    """Stop the agent's threads at the end of a process that has not called shutdown(), while Python still runs."""
    if _agent_pid == os.getpid() and _is_current_rpc_agent_set():
        answered = False
        try:
            answered = answer_served_calls(_get_current_rpc_agent(), EXIT_ANSWER_S)
        finally:
            _drop_agent(EXIT_GRACE_S if answered else 0.0)
