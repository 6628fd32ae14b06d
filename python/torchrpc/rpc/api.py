"""Calls, RRefs, and the end of a group. Private names keep upstream's spelling where others use or replace them: code
here looks them up in this module each time.
"""

import collections
import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from torchrpc._C import (
    PyRRef,
    TensorPipeAgent,
    WorkerInfo,
    _call_async,
    _call_remote,
    _call_sync,
    _calls_are_shown,
    _cleanup_python_rpc_handler,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    get_rpc_timeout,
)

from ._checks import _check_initialized as _check_initialized
from ._checks import _to_worker_info as _to_worker_info
from ._cpp_functions import is_cpp, wait_for_cpp_workers
from ._exceptions import WorkerLostError
from ._profiling import call_shown
from ._rendezvous import mark_formed
from ._utils import _group_membership_management, _update_group_membership
from .constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from .internal import RPCExecMode, _internal_rpc_pickler

__all__ = ["AllGatherStates", "RRef", "get_worker_info", "remote", "rpc_async", "rpc_sync", "shutdown"]

logger = logging.getLogger(__name__)

# Whether shutdown() is silent about RRefs that the program still holds. They are harmless, unless one looks for leaks.
_ignore_rref_leak = True

_default_pickler = _internal_rpc_pickler
_thread_local_var = threading.local()
_waiting_blocks: list[None] = []  # one for each _wait_all() that any thread is in

_LOOK_FOR_LOST = 0.25  # seconds
_CERTAINTY = 1.5  # longer than it takes to see that a worker whose connection broke is not there
_BETWEEN_SIGNALS = 0.1
_AT_MOST = 1.0  # that functions may keep a process from ending

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Have calls made in the block (by any thread) serialized by `rpc_pickler`, an `_InternalRPCPickler`."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _require_initialized(func: _F) -> _F:
    """Decorator: RuntimeError unless `init_rpc` has been called."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _check_initialized()
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


# --- Workers and references ---


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Name and id of a worker: of the one with that name (or id), of this one without an argument.

    Any thread may call; nothing is sent.

    Raises:
        RuntimeError: no such worker in the group, or RPC is not initialized.
    """
    agent = _get_current_rpc_agent()
    return agent.get_worker_info() if worker_name is None else agent.get_worker_info(worker_name)


class RRef(PyRRef, Generic[_T]):
    """A reference to a value of some type `_T` that lives on one worker, its owner.

    `RRef(value, type_hint=None)` makes one whose owner is this worker; `remote` makes one elsewhere. It can be sent in
    calls and results, and by no other way. The owner keeps the value as long as any worker holds a reference. All
    methods may be called from any thread; those that need the value wait for it.

    Raises:
        RuntimeError: RPC is not initialized.
    """


def _rref_typeof_on_owner(rref: PyRRef, blocking: bool = True) -> Any:
    kind = type(rref.local_value())
    if blocking:
        return kind
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(kind)
    return future


def _rref_typeof_on_user(rref: PyRRef, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    future = rpc_async(rref.owner(), _rref_typeof_on_owner, args=(rref,), timeout=timeout)
    return future.wait() if blocking else future


# --- Calls ---


def rpc_sync(to: Any, func: Callable, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Run `func(*args, **kwargs)` on the worker `to` and give its result.

    Args:
        to (str, int or WorkerInfo): name, rank or info of the worker; oneself is allowed.
        func (Callable): a torch operator, a script function or a `torchrpc.cpp_function` (they run there without the
            GIL), a function or class that `to` can import, a method of a picklable object, a lambda or a nested
            function (sent as code: its globals are those of the module of the same name there).
        args (tuple): anything picklable, tensors of any shape, dtype and layout on the CPU, RRefs. Tensors are not
            copied before they are sent.
        kwargs (dict): likewise.
        timeout (float): seconds until a RuntimeError; 0: no limit; default: the group's.

    Raises:
        RuntimeError: RPC is not initialized, no such worker, time-out, a lost worker.
        TypeError, ValueError: arguments of the wrong kind.
        Exception: what `func` raised, of its type, with the remote traceback in its text.

    Any thread may call.

    Example:
        >>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3), timeout=10)
        tensor([4., 4.])
    """
    if _calls_are_shown():
        return call_shown(RPCExecMode.SYNC, _call_sync, to, func, args, kwargs, timeout)
    return _call_sync(to, func, args, kwargs, timeout)


def rpc_async(to: Any, func: Callable, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Like `rpc_sync`, but return at once, with a `torch.futures.Future` for the result.

    `future.wait()` gives the result or raises what the call raised; in a coroutine, `await future` does. Keep tensors
    that you sent unchanged until then. Any thread may call, and wait for the future. Its callbacks (`then`) run on a
    thread of the pool or on one that waits for it.

    Raises:
        RuntimeError, TypeError, ValueError: as `rpc_sync`, for arguments that cannot be sent; what happens later is
            raised by the future.

    Example:
        >>> futures = [rpc.rpc_async(to, torch.add, args=(torch.ones(2), 1)) for to in ("worker1", "worker2")]
        >>> torch.futures.wait_all(futures)
        [tensor([2., 2.]), tensor([2., 2.])]
    """
    if _calls_are_shown():
        future = call_shown(RPCExecMode.ASYNC, _call_async, to, func, args, kwargs, timeout)
    else:
        future = _call_async(to, func, args, kwargs, timeout)
    if _waiting_blocks and hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def remote(to: Any, func: Callable, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> PyRRef:
    """Run `func` (a class, say) on the worker `to` and leave the result there; return an RRef to it at once.

    Arguments are those of `rpc_sync`. An error, a time-out included, is raised when the RRef is used. Any thread may
    call.

    Raises:
        RuntimeError, TypeError, ValueError: as `rpc_sync`, for arguments that cannot be sent.

    Example:
        >>> layer = rpc.remote("worker1", torch.nn.Linear, args=(4, 2))
        >>> layer.rpc_sync().forward(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    if _calls_are_shown():
        return call_shown(RPCExecMode.REMOTE, _call_remote, to, func, args, kwargs, timeout)
    return _call_remote(to, func, args, kwargs, timeout)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait, when the block ends, for all that this thread has called by `rpc_async` in it; raise the first error."""
    _thread_local_var.future_list = []
    _waiting_blocks.append(None)
    try:
        yield
    finally:
        _waiting_blocks.pop()
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# --- Gathering from all workers ---


class AllGatherStates:
    """One `_all_gather` under way on this worker."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()  # set when gathered_objects is complete


_agents_process = 0  # a fork has the agent of its parent, but must not stop it
_all_gather_dict_lock = threading.RLock()
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: collections.defaultdict[str, AllGatherStates] = collections.defaultdict(
    AllGatherStates
)


def _init_rpc_states(agent: Any) -> None:
    """Make `agent` this process' agent and start it, unless its maker has done so."""
    global _agents_process
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)
        if isinstance(agent, TensorPipeAgent) and agent.is_static_group:
            mark_formed(agent.store)
    _agents_process = os.getpid()


def _python_workers() -> set[str]:
    """Those who can take part. Not kept: others may call before init_rpc has returned here."""
    agent = _get_current_rpc_agent()
    return {worker.name for worker in agent.get_worker_infos() if not is_cpp(agent, worker)}


def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None) -> None:
    """Runs on the leader for each worker."""
    with _all_gather_dict_lock:
        worker_names = worker_names or _python_workers()
        if worker_name not in worker_names:
            raise AssertionError(f"{worker_name} is not expected by leader.")
        states = _all_gather_sequence_id_to_states[sequence_id]
        if worker_name in states.gathered_objects:
            raise AssertionError(f"{worker_name} reported intent sequence id {sequence_id} twice. ")
        states.gathered_objects[worker_name] = obj
        if worker_names == set(states.gathered_objects):
            states.proceed_signal.set()


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """Runs on each follower when the leader has everything."""
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    if states.proceed_signal.is_set():
        raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
    states.gathered_objects = objects_map
    states.proceed_signal.set()


@_require_initialized
def _all_gather(obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """Every worker (of `worker_names`) gives an object and gets {name: object} of all.

    The worker with the least name leads: it collects and hands out. Blocks until this worker has it all.

    Args:
        timeout (float): seconds for each message and for the wait; unset: the group's for messages, none for the wait;
            0: none for either.

    Raises:
        WorkerLostError: some are lost; when all others have come.
        RuntimeError: time-out, or a worker that could not be reached.
    """
    names = set(worker_names or _python_workers())
    me = _get_current_rpc_agent().get_worker_info().name
    with _all_gather_dict_lock:
        group = "".join(sorted(names))
        number = _all_gather_sequence_id.get(group, 0)
        _all_gather_sequence_id[group] = number + 1
    sequence_id = group + str(number)

    message_timeout = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    wait_timeout = None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    lost: set[str] = set()
    while True:
        leader = min(names - lost)
        try:
            if me == leader:
                _gather_to_leader(sequence_id, me, obj, names)
            else:
                rpc_sync(leader, _gather_to_leader, args=(sequence_id, me, obj, names), timeout=message_timeout)
            states = _await_all(sequence_id, me, leader, names, wait_timeout)
            break
        except WorkerLostError:
            if me == leader or leader not in _lost_of({leader}, patience=_CERTAINTY):
                raise
            lost.add(leader)  # the next one leads
    missing = sorted(names - set(states.gathered_objects))
    if me == leader:
        _hand_out(sequence_id, states.gathered_objects, names - {leader, *missing}, message_timeout)
    with _all_gather_dict_lock:
        gathered = _all_gather_sequence_id_to_states.pop(sequence_id).gathered_objects
    if missing:
        raise WorkerLostError(f"{me} went on without {', '.join(missing)}, lost before all had come.", missing[0])
    return gathered


def _await_all(sequence_id: str, me: str, leader: str, names: set[str], timeout: float | None) -> AllGatherStates:
    """Block until the leader has heard of all that are not lost, or a follower of the leader."""
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    end = math.inf if timeout is None else time.monotonic() + timeout
    while not states.proceed_signal.wait(max(0, min(_LOOK_FOR_LOST, end - time.monotonic()))):
        awaited = names - set(states.gathered_objects) if me == leader else {leader}
        if time.monotonic() >= end:
            waiting_for = sorted(awaited)
            raise RuntimeError(f"{me} timed out in _all_gather after {timeout:.2f} seconds, waiting for {waiting_for}.")
        if awaited <= (lost := _lost_of(awaited)):
            if me != leader:
                raise WorkerLostError(f"{leader}, who leads _all_gather for {me}, was lost.", leader)
            logger.warning("%s waits no longer for %s, lost before they came.", me, sorted(lost))
            states.proceed_signal.set()
    return states


def _lost_of(names: set[str], patience: float = 0) -> set[str]:
    """Which of these workers are lost. Someone whose connection has just broken counts after a moment: ask with it."""
    agent = _get_current_rpc_agent()
    if not isinstance(agent, TensorPipeAgent):
        return set()
    ids = {}
    for name in names:
        with contextlib.suppress(RuntimeError):
            ids[agent.get_worker_info(name).id] = name
    gone = names - set(ids.values())  # they have left the group
    end = time.monotonic() + patience
    while len(lost := agent._lost_among(list(ids))) < len(ids) and time.monotonic() < end:
        time.sleep(0.05)
    return gone | {ids[worker] for worker in lost}


def _hand_out(sequence_id: str, objects: dict[str, Any], followers: Iterable[str], timeout: float) -> None:
    futures = {
        name: rpc_async(name, _broadcast_to_followers, args=(sequence_id, objects), timeout=timeout)
        for name in followers
    }
    errors = []
    for name, future in futures.items():
        try:
            future.wait()
        except RuntimeError as exc:
            errors.append((name, exc))
    if errors:
        names, first = [name for name, _ in errors], errors[0][1]
        text = f"Followers {names} timed out in _all_gather after {timeout:.2f} seconds. The first exception is {first}"
        raise WorkerLostError(text, first.worker) if isinstance(first, WorkerLostError) else RuntimeError(text)


@_require_initialized
def _barrier(worker_names: Iterable[str]) -> None:
    """Block until all workers of that list have come here. Time-outs are logged, not raised."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Block until all workers have come here."""
    try:
        _all_gather(None, timeout=timeout)
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# --- The end ---


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group and stop this process' part of RPC; after it `init_rpc` may be called again.

    Args:
        graceful (bool): wait until all workers have called shutdown() and all work is done, and delete this worker's
            references. False: stop at once; calls of others to this worker fail.
        timeout (float): seconds to wait; 0: no limit.

    Raises:
        WorkerLostError: it names a worker that is lost; the others have ended in good order.
        RuntimeError: a worker did not come in time. Or, if `api._ignore_rref_leak` is False, the program still holds
            references.

    This worker is shut down all the same. One thread calls it, not one that serves a call. A worker that is lost (see
    the option `liveness_timeout`) is not waited for; one that is busy is, however long.
    """
    patience = math.inf
    try:
        if graceful:
            _end_gracefully(timeout)
    except BaseException as exc:
        if not isinstance(exc, Exception):  # after Ctrl-C functions that still run are not waited for
            patience = _AT_MOST
        raise
    finally:
        _finalize_shutdown(patience)


def _end_gracefully(timeout: float) -> None:
    agent = _get_current_rpc_agent()
    if isinstance(agent, TensorPipeAgent) and not agent.is_static_group:
        _leave_group(agent, timeout)
        return
    lost: WorkerLostError | None = None
    for step, needs_store in (
        (lambda: _wait_all_workers(timeout), False),
        (lambda: wait_for_cpp_workers(agent, timeout), True),
        (_delete_all_user_and_unforked_owner_rrefs, False),
        (lambda: agent.join(shutdown=True, timeout=timeout), True),
    ):
        if lost and needs_store and agent.get_worker_info().id != 0 and agent._lost_among([0]):
            continue  # rank 0 serves the store: one that is stopped would keep us waiting for it
        try:
            step()
        except WorkerLostError as exc:  # the others go on together
            lost = lost or exc
        except RuntimeError:  # the store may have gone with who was lost
            if not lost:
                raise
    if lost:
        raise lost


def _leave_group(agent: TensorPipeAgent, timeout: float) -> None:
    """Tell the other members of a group without a fixed size."""
    me = agent.get_worker_info()
    with _group_membership_management(agent.store, me.name, False):
        for worker in agent.get_worker_infos():
            if worker.name != me.name:
                try:
                    rpc_sync(worker.name, _update_group_membership, args=(me, [], {}, False))
                except RuntimeError as exc:  # it may be gone itself
                    logger.warning("%s could not tell %s that it leaves the group: %s", me.name, worker.name, exc)
        agent.join(shutdown=True, timeout=timeout)


def _finalize_shutdown(patience: float = math.inf) -> None:
    try:
        _destroy_rref_context(_ignore_rref_leak)
    finally:
        _drop_agent(patience)


def _drop_agent(patience: float = math.inf) -> None:
    """Stop the agent and forget everything of its group, so that the next one begins afresh.

    Functions that others have called here and that still run are waited for, at most `patience` seconds, or until
    Ctrl-C.
    """
    agent = _get_current_rpc_agent()
    try:
        if isinstance(agent, TensorPipeAgent):
            _stop(agent, time.monotonic() + patience)
        else:
            agent.shutdown()
    finally:
        _cleanup_python_rpc_handler()
        _reset_current_rpc_agent()
        with _all_gather_dict_lock:
            _all_gather_sequence_id.clear()
            _all_gather_sequence_id_to_states.clear()


def _stop(agent: TensorPipeAgent, end: float) -> None:
    try:
        while not agent.shutdown(patience=_BETWEEN_SIGNALS):
            if time.monotonic() >= end:
                logger.warning("%s ends while functions run that others have called.", agent.get_worker_info().name)
                agent._abandon()
                return
    except BaseException:  # what a signal's handler raises
        agent._abandon()
        raise


def _leave_at_exit() -> None:
    """A process that ends without shutdown() must stop its threads while Python is still there for them."""
    if _agents_process == os.getpid() and _is_current_rpc_agent_set():
        _drop_agent(_AT_MOST)
