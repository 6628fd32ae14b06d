"""Workers, RRefs, calls and the end of a group, under the names of upstream's module.

Scripts and upstream's tests replace names of this module (`api._all_gather`, `api._ignore_rref_leak` …). So functions
here look up each other, and the extension's functions, in this module each time. The modules `_calls`, `_gather` and
`_shutdown` do the work and do not import this one.
"""

import contextlib
import datetime
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

import torchrpc.autograd as dist_autograd
from torchrpc._C import (
    PyRRef,
    TensorPipeAgent,
    WorkerInfo,
    _caller,
    _caller_is_client,
    _cleanup_python_rpc_handler,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _rref_context_get_debug_info,
    _serves_call,
    _set_and_start_rpc_agent,
    get_rpc_timeout,
)

from ._absent import CALL, Absent
from ._calls import sending
from ._calls.checks import _check_initialized as _check_initialized
from ._calls.checks import _to_worker_info as _to_worker_info
from ._calls.checks import check_caller, check_seconds
from ._calls.coroutines import on_event_loop, stop_event_loop
from ._calls.sending import _wait_all as _wait_all
from ._calls.sending import remote, rpc_async, rpc_sync
from ._errors import NotAllowedError, RpcError, WorkerLostError
from ._group import gather
from ._group.gather import AllGatherStates
from ._group.members import attach, detach, get_workers
from ._group.rendezvous import mark_formed, shorten_end_of_store
from ._group.shutdown import (
    EXIT_ANSWER_S,
    EXIT_GRACE_S,
    EndTurn,
    answer_served_calls,
    end_static_group,
    let_lost_workers_exit_first,
    stop_agent,
)
from ._security.allow_list import local_value
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
_DELETE_RREFS_S = 100.0  # the extension's own limit
_agent_pid = 0  # the process that started the agent: a forked child inherits the agent, but must not stop it

# Upstream's names for state of the modules that do the work.
_thread_local_var = sending.thread_local
_all_gather_dict_lock = gather.lock
_all_gather_sequence_id = gather.next_numbers
_all_gather_sequence_id_to_states = gather.states_by_id
_invoke_rpc: Any = Absent("_invoke_rpc", CALL)


def __getattr__(name: str) -> Any:
    if name == "_ALL_WORKER_NAMES":  # not kept: others may call this worker before init_rpc has returned here
        return {worker.name for worker in get_worker_infos()} if _is_current_rpc_agent_set() else set()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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


class _RRefMeta(type(PyRRef)):  # type: ignore[misc]
    """The extension makes instances of PyRRef only. Each of them is an RRef, also for `isinstance` and `issubclass`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(PyRRef if cls is RRef else cls, instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return type.__subclasscheck__(PyRRef if cls is RRef else cls, subclass)


class RRef(PyRRef, Generic[_T], metaclass=_RRefMeta):
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
    if not gather.is_own_part():
        check_caller(worker_name)
        if obj is not None and _caller_is_client():
            me = get_worker_info().name
            raise NotAllowedError(
                f"{me} lets {worker_name}, a client, take part in barriers only, not gather objects.", me
            )
    names = worker_names or gather.python_workers(_get_current_rpc_agent())
    gather.record_object(sequence_id, worker_name, obj, set(names))


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any] | None) -> None:
    """Record the objects of all workers. The leader calls it on each follower when it has all objects."""
    caller = _caller()
    gather.record_all(sequence_id, objects_map, None if caller is None else caller.name)


def _gathering_numbers(worker_name: str) -> dict[str, int]:
    """Return the numbers of the next gatherings. A restarted worker calls it on another worker."""
    check_caller(worker_name)
    return gather.numbers_for(worker_name)


def _adopt_gatherings() -> None:
    """In a restarted worker: take part in the gatherings of the others from the next one on."""
    me = get_worker_info()
    for name in sorted({worker.name for worker in get_workers()} & gather.python_workers(_get_current_rpc_agent())):
        if name == me.name:
            continue
        try:
            # The others report to the worker with the smallest name.
            return gather.adopt_numbers(rpc_sync(name, _gathering_numbers, args=(me.name,)))
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
    wait_timeout = None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    deadline = math.inf if wait_timeout is None else time.monotonic() + wait_timeout

    def message_limit() -> float:
        return message_timeout if wait_timeout is None else _left_s(deadline)

    def report(leader: str, *args: Any) -> None:
        if leader == me:
            with gather.own_part():
                _gather_to_leader(*args)
        else:
            rpc_sync(leader, _gather_to_leader, args=args, timeout=message_limit())

    def distribute(follower: str, *args: Any) -> torch.futures.Future:
        return rpc_async(follower, _broadcast_to_followers, args=args, timeout=message_limit())

    names = set(worker_names or gather.python_workers(agent))
    return gather.Gathering(agent, names, message_timeout, wait_timeout, report, distribute).run(obj)


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
    _all_gather(None, timeout=timeout)


# --- The end ---


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group and stop RPC in this process; `init_rpc` may be called again afterwards.

    Args:
        graceful (bool): wait until all workers have called shutdown() and all work is done, and delete this worker's
            references. False: stop now. Calls that this worker serves at that moment have 5 seconds to answer; later
            calls, and calls that take longer, fail.
        timeout (float): seconds for all steps of the shutdown together; 0: no limit. Functions that still run then are
            left behind without RPC.

    Raises:
        WorkerLostError: a worker is lost; the text names it. The other workers have ended in order.
        RpcTimeoutError: a worker did not call shutdown(), or did not end its work, in time.
        ShutdownError: RPC is not initialized.
        RpcError: the thread serves a call, or, if `api._ignore_rref_leak` is False, the program still holds references.
        TypeError, ValueError: `timeout` is not a number of seconds, or is negative. The worker is not shut down.

    From now on, calls that other threads of this process make raise `ShutdownError`, except in functions that serve
    other workers and in callbacks of futures. This worker is shut down even if `shutdown` raises an error, unless the
    thread serves a call: then `shutdown` only raises the RpcError. While it runs, a second call by another thread waits
    for the first one and returns, or, if it is not graceful, stops RPC. One by a signal handler returns at once. It
    does not wait for a lost worker (see the option `liveness_timeout`), but it waits for a busy one, without a limit
    unless `timeout` is given. In the process that has started a `torchrpc.local_group`, it has the other workers end,
    too.
    """
    if _serves_call() or on_event_loop():
        raise RpcError(
            "shutdown() cannot be called by a function that another worker has called: it would wait for that "
            "function. Let the function tell the main thread, for example by a threading.Event, and call it there."
        )
    check_seconds(timeout, "0: no limit.")
    deadline = time.monotonic() + (timeout or math.inf)
    if _end_turn.is_taken_here():
        return
    if _end_turn.take():
        try:
            _shut_down(graceful, deadline)
        finally:
            _end_turn.give_back()
    elif graceful:
        _end_turn.wait(deadline)
    else:
        _shut_down(graceful, deadline)  # now, whatever the other thread waits for


_end_turn = EndTurn()
# Set by a local_group in the process that has started its workers: has them end, which they do not without being told.
_end_started_workers: Callable[[], None] | None = None


def _shut_down(graceful: bool, deadline: float) -> None:
    agent = _get_current_rpc_agent()
    if graceful and _end_started_workers is not None:
        _end_started_workers()
    if isinstance(agent, TensorPipeAgent):
        agent._refuse_own_calls()
    try:
        if graceful:
            _end_gracefully(agent, deadline)
    except BaseException as exc:
        if not isinstance(exc, Exception):  # Ctrl-C: do not wait for functions that still run
            deadline = min(deadline, time.monotonic() + EXIT_GRACE_S)
        raise
    finally:
        _finalize_shutdown(deadline)


def _left_s(deadline: float) -> float:
    """Return the seconds until the deadline as a time-out, where 0 means that there is no limit."""
    return 0.0 if deadline == math.inf else max(deadline - time.monotonic(), 0.001)


def _end_gracefully(agent: Any, deadline: float) -> None:
    if isinstance(agent, TensorPipeAgent) and not agent.is_static_group:
        return _leave_dynamic_group(agent, deadline)

    def delete_rrefs() -> None:
        # Without an argument if possible, because scripts replace the function.
        limit = () if deadline == math.inf else (datetime.timedelta(seconds=min(_left_s(deadline), _DELETE_RREFS_S)),)
        _delete_all_user_and_unforked_owner_rrefs(*limit)

    end_static_group(agent, lambda: _left_s(deadline), lambda: _wait_all_workers(_left_s(deadline)), delete_rrefs)


def _leave_dynamic_group(agent: TensorPipeAgent, deadline: float) -> None:
    """Tell the other members of a group without a fixed size that this worker leaves."""
    me = agent.get_worker_info()
    with _group_membership_management(agent.store, me.name, False, deadline - time.monotonic()):
        for worker in agent.get_worker_infos():
            if worker.name != me.name:
                try:
                    timeout = _left_s(deadline) or UNSET_RPC_TIMEOUT
                    rpc_sync(worker.name, _update_group_membership, args=(me, [], {}, False), timeout=timeout)
                except RuntimeError as exc:  # that worker may have ended
                    logger.warning("%s could not tell %s that it leaves the group: %s", me.name, worker.name, exc)
        agent.join(shutdown=True, timeout=_left_s(deadline))


@_require_initialized
def _get_debug_info() -> dict[str, str]:
    """Return the counters of the RRef tables, the agent and distributed autograd."""
    agent = _get_current_rpc_agent()
    return {**_rref_context_get_debug_info(), **agent.get_debug_info(), **dist_autograd._get_debug_info()}


def _finalize_shutdown(deadline: float = math.inf) -> None:
    try:
        try:
            # First, because the functions that it serves may use RRefs.
            answer_served_calls(_get_current_rpc_agent(), max(deadline - time.monotonic(), 0.0))
        except BaseException:
            deadline = min(deadline, time.monotonic() + EXIT_GRACE_S)
            raise
        _destroy_rref_context(_ignore_rref_leak)
    finally:
        _drop_agent(deadline=deadline)


def _drop_agent(grace_s: float = math.inf, deadline: float = math.inf) -> None:
    """Stop the agent and delete all state of its group, so that the next group starts afresh.

    Blocks until functions that other workers called here have returned: for at most `grace_s` seconds, until the
    deadline (of `time.monotonic`), or until Ctrl-C.
    """
    agent = _get_current_rpc_agent()
    try:
        stop_event_loop(max(deadline - time.monotonic(), 0.0))
        stop_agent(agent, min(grace_s, max(deadline - time.monotonic(), 0.0)))
    finally:
        shorten_end_of_store()
        _cleanup_python_rpc_handler()
        detach()
        _reset_current_rpc_agent()
        gather.forget_all()


def _leave_at_exit() -> None:
    """Stop the agent's threads at the end of a process that has not called shutdown(), while Python still runs."""
    if _agent_pid == os.getpid() and _is_current_rpc_agent_set():
        answered = False
        try:
            agent = _get_current_rpc_agent()
            answered = answer_served_calls(agent, EXIT_ANSWER_S)
            let_lost_workers_exit_first(agent)
        finally:
            _drop_agent(EXIT_GRACE_S if answered else 0.0)
