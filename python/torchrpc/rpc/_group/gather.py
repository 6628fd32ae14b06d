"""`_all_gather`: every worker of a set contributes an object and receives the objects of all.

The worker with the smallest name (among the members, if there are clients) is the leader. The others send it their
objects, and it sends all objects back. In a barrier, where all objects are None, it only sends that the barrier is
complete. If the leader is lost, the worker with the next name leads. This module keeps the state of gatherings in
progress. It gets the functions that send messages as arguments, because scripts replace these in `api`.

Threads: `Gathering` belongs to the thread that gathers. `record_object` and `record_all` run on threads of the pool.
"""

import collections
import contextlib
import functools
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torchrpc._C import TensorPipeAgent, _Barrier

from .._calls.cpp_functions import is_cpp
from .._errors import NotAllowedError, QuotaExceededError, RpcError, RpcTimeoutError, WorkerLostError

logger = logging.getLogger(__name__)

_REPORTED_TWICE = "reported intent sequence id"  # in the error of a leader that has this worker's report already
_LOST_POLL_S = 0.25  # between two checks whether a worker is lost
_LOST_CONFIRM_S = 1.5  # a worker whose connection broke counts as lost within this time
_LOST_CONFIRM_POLL_S = 0.05
_KEEP_CALLS_S = 0.1  # at most, while a follower does not answer
_QUOTA_PAUSE_S = 0.02  # before a message that a quota has refused is sent again

_MOST_EARLY_REPORTS = 1000
_MOST_ID_CHARACTERS = 64  # a digest and a number

LOST_WORKERS = "_lost_workers"  # attribute of this module's WorkerLostErrors: the names of all lost workers


class AllGatherStates:
    """The state of one `_all_gather` on this worker.

    Attributes:
        gathered_objects (dict): worker name -> its object.
        proceed_signal (threading.Event): set when `gathered_objects` is complete.
    """

    __module__ = "torchrpc.rpc.api"

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()
        self._names: set[str] | None = None  # the workers that take part; None: this worker has not begun yet
        self._leaders: set[str] = set()  # the workers to which this one has reported


lock = threading.RLock()  # guards the two tables
next_numbers: dict[str, int] = {}  # the digest of a set of workers -> the number of its next gathering
states_by_id: collections.defaultdict[str, AllGatherStates] = collections.defaultdict(AllGatherStates)


def forget_all() -> None:
    """Drop all state at the end of a group, so that the next group starts at number 0."""
    with lock:
        next_numbers.clear()
        states_by_id.clear()


_thread = threading.local()


@contextlib.contextmanager
def own_part() -> Iterator[None]:
    """Let this thread record this worker's own object in the block, even if it serves a call of another worker."""
    _thread.is_own_part = True
    try:
        yield
    finally:
        _thread.is_own_part = False


def is_own_part() -> bool:
    """Whether this thread is in a block of `own_part`."""
    return getattr(_thread, "is_own_part", False)


def _forget_parent() -> None:
    """Replace the lock in a forked child: another thread of the parent may have held it."""
    global lock
    lock = threading.RLock()
    forget_all()


os.register_at_fork(after_in_child=_forget_parent)


def python_workers(agent: Any) -> set[str]:
    """Return the names of the workers that can gather.

    They are not cached: other workers may call this one before init_rpc has returned here.
    """
    return {worker.name for worker in agent.get_worker_infos() if not is_cpp(agent, worker)}


def record_object(sequence_id: str, worker_name: str, obj: Any, worker_names: set[str]) -> None:
    """On the leader: record the object of one worker.

    Only the leader itself determines which workers take part. Before that, a worker may report to at most
    `_MOST_EARLY_REPORTS` gatherings.
    """
    if len(sequence_id) > _MOST_ID_CHARACTERS:
        raise RpcError(f"{worker_name} takes part in a gathering whose id is too long.")
    with lock:
        states = states_by_id.get(sequence_id, AllGatherStates())
        if worker_name not in (states._names or worker_names):
            raise AssertionError(f"{worker_name} is not expected by leader.")
        if worker_name in states.gathered_objects:
            raise AssertionError(f"{worker_name} {_REPORTED_TWICE} {sequence_id} twice. ")
        if states._names is None and not is_own_part():
            early = sum(s._names is None and worker_name in s.gathered_objects for s in states_by_id.values())
            if early >= _MOST_EARLY_REPORTS:
                raise RpcError(f"{worker_name} takes part in too many gatherings that this worker has not begun.")
        states_by_id[sequence_id] = states
        states.gathered_objects[worker_name] = obj
        if states._names is not None and states._names <= set(states.gathered_objects):
            states.proceed_signal.set()


def record_all(sequence_id: str, objects_map: dict[str, Any] | None, leader: str | None) -> None:
    """On a follower: record the objects of all workers, which the leader has sent; None: all workers contributed None.

    Raises:
        NotAllowedError: this worker has not reported to that leader.
    """
    with lock:
        states = states_by_id.get(sequence_id)
        if states is None or states._names is None or (leader is not None and leader not in states._leaders):
            raise NotAllowedError(f"{leader} does not lead a gathering in which this worker takes part.", leader or "")
        if objects_map is None:
            objects_map = dict.fromkeys(sorted(states._names))
        if not states._names >= set(objects_map):
            raise AssertionError(f"{sorted(set(objects_map) - states._names)} do not take part in the gathering.")
        if states.proceed_signal.is_set():
            raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
        states.gathered_objects = objects_map
        states.proceed_signal.set()


def numbers_for(worker_name: str) -> dict[str, int]:
    """For a restarted worker, return the number of the next gathering of each set of workers.

    If the others still wait for the worker in a gathering, that is the number of this gathering.
    """
    with lock:
        numbers = dict(next_numbers)
        for sequence_id, states in states_by_id.items():
            if states._names is None:
                states.gathered_objects.pop(worker_name, None)  # an early report of its earlier process
            elif worker_name in states._names - set(states.gathered_objects) and not states.proceed_signal.is_set():
                digest, _, number = sequence_id.rpartition("-")
                numbers[digest] = min(numbers.get(digest, int(number)), int(number))
        return numbers


def adopt_numbers(numbers: dict[str, int]) -> None:
    """Adopt the others' numbers for sets of workers with which this worker has not gathered yet."""
    with lock:
        for digest, number in numbers.items():
            next_numbers.setdefault(digest, number)


def digest_of(names: Iterable[str]) -> str:
    """Return a digest of fixed size for a set of names. Each message of a gathering contains it."""
    return hashlib.blake2b("\0".join(sorted(names)).encode(), digest_size=16).hexdigest()


class _LeaderIsBack(Exception):
    """A worker that was taken for lost leads the gathering."""


class Gathering:
    """This worker's part in one `_all_gather`.

    Args:
        names: the workers that take part.
        message_timeout_s: the time-out of each message; used in error texts.
        wait_timeout_s: seconds to wait for the others; None: no limit.
        report: `report(leader, sequence_id, worker_name, obj, names)` has the leader run `record_object`; blocks.
        distribute: `distribute(follower, sequence_id, objects)` has a follower run `record_all`; returns a future.
    """

    def __init__(
        self,
        agent: Any,
        names: set[str],
        message_timeout_s: float,
        wait_timeout_s: float | None,
        report: Callable[..., None],
        distribute: Callable[..., torch.futures.Future],
    ) -> None:
        self._agent = agent
        self._me: str = agent.get_worker_info().name
        self._names = names
        self._message_timeout_s = message_timeout_s
        self._wait_timeout_s = wait_timeout_s
        self._deadline = math.inf if wait_timeout_s is None else time.monotonic() + wait_timeout_s
        self._leader_incarnation = 0
        self._report = report
        self._distribute = distribute
        group = digest_of(names)
        with lock:
            number = next_numbers.get(group, 0)
            next_numbers[group] = number + 1
        self._sequence_id = f"{group}-{number}"

    def run(self, obj: Any) -> dict[str, Any]:
        """Contribute `obj`; block until this worker has the objects of all, and return them by worker name.

        Raises:
            WorkerLostError: some workers are lost; all others have contributed by then.
            RpcTimeoutError, RpcError: time-out, or a worker that could not be reached.
        """
        lost: set[str] = set()  # leaders
        while True:
            leader = self._leader_of(self._names - lost)
            self._leader_incarnation = self._incarnation_of(leader)
            try:
                is_first_report = self._begin(leader)
                # A list, because a set is not plain data. The leader knows which workers take part.
                names = sorted(self._names) if self._me == leader else [self._me]
                report = functools.partial(self._report, leader, self._sequence_id, self._me, obj, names)
                try:
                    self._when_granted(report, report)
                except AssertionError as exc:
                    # The first report to this leader may have arrived although it was taken for lost.
                    if is_first_report or _REPORTED_TWICE not in str(exc):
                        raise
                with _Barrier(f"_all_gather {self._sequence_id}"):
                    states = self._wait_for_objects(leader, lost)
                break
            except _LeaderIsBack:
                lost.clear()
            except WorkerLostError:
                if self._me == leader:
                    raise
                if leader in self._lost_among({leader}, confirm_s=_LOST_CONFIRM_S):
                    lost.add(leader)
                elif self._incarnation_of(leader) == self._leader_incarnation:
                    raise
                # Otherwise the leader has been restarted, and asks the others for this gathering's number.
        missing = sorted(self._names - set(states.gathered_objects))
        if self._me == leader:
            with self._keeping_calls():
                self._distribute_to(self._names - {leader, *missing}, states.gathered_objects)
        with lock:
            gathered = states_by_id.pop(self._sequence_id).gathered_objects
        if missing:
            text = f"{self._me} continued without {', '.join(missing)}, lost before they had reported."
            error = WorkerLostError(text, missing[0])
            vars(error)[LOST_WORKERS] = missing
            raise error
        return gathered

    def _when_granted(self, first: Callable[[], Any], again: Callable[[], Any]) -> None:
        """Run `first`; run `again` until no quota refuses it: calls of this worker that are under way use the quota."""
        attempt = first
        while True:
            try:
                attempt()
                return
            except QuotaExceededError:
                if time.monotonic() > self._deadline:
                    raise
                time.sleep(_QUOTA_PAUSE_S)
                attempt = again

    def _incarnation_of(self, name: str) -> int:
        """Return a number that changes when the worker is started again."""
        if not isinstance(self._agent, TensorPipeAgent):
            return 0
        with contextlib.suppress(RuntimeError):  # the worker has left
            return self._agent._incarnation(self._agent.get_worker_info(name).id)
        return 0

    def _leader_of(self, names: set[str]) -> str:
        """Return the smallest name of a member, or of any worker without members: a client may be refused as leader."""
        if not isinstance(self._agent, TensorPipeAgent):
            return min(names)
        members = {each.name for each in self._agent.get_worker_infos() if self._agent._is_member(each.id)}
        return min(names & members or names)

    def _begin(self, leader: str) -> bool:
        """Return whether this worker has not reported to the leader before."""
        with lock:
            states = states_by_id[self._sequence_id]
            is_first_report = leader not in states._leaders
            states._names = self._names
            states._leaders.add(leader)
            for name in set(states.gathered_objects) - self._names:
                del states.gathered_objects[name]  # the worker `name` does not take part
        return is_first_report

    def _wait_for_objects(self, leader: str, lost_leaders: set[str]) -> AllGatherStates:
        """On the leader, block until all workers that are not lost have reported; on a follower, until the leader has
        distributed the objects.

        Raises:
            _LeaderIsBack: one of the earlier leaders was silent, and is not lost. It waits for this worker's report.
        """
        with lock:
            states = states_by_id[self._sequence_id]
        while not states.proceed_signal.wait(max(0, min(_LOST_POLL_S, self._deadline - time.monotonic()))):
            outstanding = self._names - set(states.gathered_objects) if self._me == leader else {leader}
            if time.monotonic() >= self._deadline:
                waiting_for = sorted(outstanding)
                raise RpcTimeoutError(
                    f"{self._me} timed out in _all_gather after {self._wait_timeout_s:.2f} seconds, waiting for "
                    f"{waiting_for}."
                )
            if self._me != leader and self._incarnation_of(leader) != self._leader_incarnation:
                raise WorkerLostError(f"{leader}, the leader of _all_gather for {self._me}, was started again.", leader)
            if lost_leaders and lost_leaders - self._lost_among(lost_leaders):
                raise _LeaderIsBack
            if outstanding <= (lost := self._lost_among(outstanding)):
                if self._me != leader:
                    raise WorkerLostError(f"{leader}, the leader of _all_gather for {self._me}, was lost.", leader)
                logger.info("%s continues without %s, which were lost before they reported.", self._me, sorted(lost))
                states.proceed_signal.set()
        return states

    def _lost_among(self, names: set[str], confirm_s: float = 0) -> set[str]:
        """Return the workers that are lost or have left. Check again for up to `confirm_s` seconds, until all are."""
        if not isinstance(self._agent, TensorPipeAgent):
            return set()
        names_by_id = {}
        for name in names:
            with contextlib.suppress(RuntimeError):
                names_by_id[self._agent.get_worker_info(name).id] = name
        have_left = names - set(names_by_id.values())
        deadline = min(time.monotonic() + confirm_s, self._deadline)
        while len(lost := self._agent._lost_among(list(names_by_id))) < len(names_by_id):
            if time.monotonic() >= deadline:
                break
            time.sleep(_LOST_CONFIRM_POLL_S)
        return have_left | {names_by_id[worker] for worker in lost}

    @contextlib.contextmanager
    def _keeping_calls(self) -> Iterator[None]:
        """Keep calls of user functions in the block: the others return from the gathering while the leader, which
        often sets up what their next calls use, still waits for the last of them.
        """
        hold = self._agent._keep_calls(_KEEP_CALLS_S) if isinstance(self._agent, TensorPipeAgent) else None
        try:
            yield
        finally:
            if hold:
                hold.release()

    def _distribute_to(self, followers: Iterable[str], objects: dict[str, Any]) -> None:
        # The followers know the names, so a barrier sends None: otherwise each of its N messages would carry N names.
        is_barrier = set(objects) == self._names and all(each is None for each in objects.values())
        sent = None if is_barrier else objects

        def send_again(name: str) -> None:
            self._distribute(name, self._sequence_id, sent).wait()

        futures = {name: self._distribute(name, self._sequence_id, sent) for name in followers}
        errors: dict[str, RuntimeError] = {}
        for name, future in futures.items():
            try:
                self._when_granted(future.wait, functools.partial(send_again, name))
            except RuntimeError as exc:
                errors[name] = exc
        if errors:
            first = next(iter(errors.values()))
            if isinstance(first, WorkerLostError):
                raise WorkerLostError(f"{', '.join(errors)} did not get the objects of all: {first}", first.worker)
            text = (
                f"Followers {list(errors)} timed out in _all_gather after {self._message_timeout_s:.2f} seconds. The "
                f"first exception is {first}"
            )
            raise (RpcTimeoutError if isinstance(first, RpcTimeoutError) else RpcError)(text)
