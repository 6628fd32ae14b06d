"""How the workers of a group of fixed size end together, and how this worker's agent is stopped.

Runs on the thread that calls `shutdown`, or at the exit of the process. It gets the functions that scripts replace in
`api` as arguments.
"""

import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from torchrpc import _C
from torchrpc._C import TensorPipeAgent
from torchrpc.observe import _reports as reading

from .._calls.cpp_functions import wait_for_cpp_workers
from .._errors import RpcTimeoutError, WorkerLostError
from .gather import LOST_WORKERS

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 1.0  # for functions that still run here when the process ends or is interrupted
# A process that has lost a worker exits later by this, because launchers such as mp.spawn show the error of the process
# that ends first, and the lost worker may have raised an exception that is the cause. A process whose call a worker has
# refused because it is shutting down first waits for the end of that worker, for EXIT_ANSWER_S at most.
EXIT_AFTER_LOSS_S = 1.0
EXIT_ANSWER_S = 2.5  # for the answers of functions that serve other workers when the process ends
_MOST_DESCRIBED = 16  # workers that the error of a time-out describes
_REPORT_S = 0.5  # how long they have to tell what they do
_END_CHECK_S = 0.02  # between two looks at whether a worker has ended
_SIGNAL_CHECK_S = 0.1  # between two chances for Python to run signal handlers while the agent stops


class EndTurn:
    """Lets one thread shut down, although a signal handler or another thread may ask for it meanwhile. Any thread."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._is_taken = False

    def is_taken_here(self) -> bool:
        """Whether this thread shuts down, and runs a signal handler."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._is_taken
        finally:
            self._lock.release()

    def take(self) -> bool:
        """Return whether the caller shuts down, and then gives the turn back. False: another thread does."""
        if not self._lock.acquire(blocking=False):
            return False
        self._is_taken = True
        return True

    def wait(self, deadline: float) -> None:
        """Block until the other thread has given its turn back.

        Raises:
            RpcTimeoutError: it has not by the deadline, a time of time.monotonic().
        """
        left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        if not self._lock.acquire(timeout=left):
            raise RpcTimeoutError("shutdown() on another thread has not returned within the time-out of this one.")
        self._lock.release()

    def give_back(self) -> None:
        self._is_taken = False
        self._lock.release()


def end_static_group(
    agent: Any, left_s: Callable[[], float], wait_all_workers: Callable[[], None], delete_rrefs: Callable[[], None]
) -> None:
    """Run the steps of a graceful shutdown; steps after the loss of a worker run without it.

    Args:
        left_s: returns the seconds that are left for all steps; 0: no limit.
        wait_all_workers: blocks until all Python workers have called shutdown.
        delete_rrefs: deletes this worker's references.

    Raises:
        WorkerLostError: a worker is lost. All steps have run, except those that need a store which is lost with rank 0.
        RuntimeError: a step failed or timed out; later steps have not run.
    """
    lost: list[str] = []
    for step, needs_store in (
        (wait_all_workers, False),
        (lambda: wait_for_cpp_workers(agent, left_s()), True),
        (delete_rrefs, False),
        (lambda: agent.join(shutdown=True, timeout=left_s()), True),
    ):
        # Rank 0 serves the store. If it is stopped (SIGSTOP), a request to the store would block.
        if lost and needs_store and agent.get_worker_info().id != 0 and agent._lost_among([0]):
            continue
        try:
            step()
        except WorkerLostError as exc:
            lost += vars(exc).get(LOST_WORKERS) or [exc.worker]
        except RuntimeError as exc:  # the store may have ended with the lost worker
            if lost:
                continue
            if isinstance(exc, RpcTimeoutError):
                raise RpcTimeoutError(f"{exc} {_what_holds_up(agent)}", exc.worker) from exc
            raise
    if lost:
        names = list(dict.fromkeys(lost))
        text = (
            f"{agent.get_worker_info().name} has shut down without {', '.join(names)}, lost before the group had ended."
        )
        raise WorkerLostError(text, names[0])


def _what_holds_up(agent: Any) -> str:
    """Return, after the time-out of a shutdown, which workers hold it up, what they do, and what to do about it."""
    me = agent.get_worker_info().name
    names = [worker.name for worker in agent.get_worker_infos()][:_MOST_DESCRIBED]
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        told = list(pool.map(lambda name: _what_it_does(name, name == me), names))
    advice = "Let these calls end, call shutdown() on each worker, or pass a longer timeout."
    return " ".join([*filter(None, told), advice, "shutdown(graceful=False) does not wait for other workers."])


def _what_it_does(name: str, is_in_shutdown: bool) -> str:
    """Return the calls that a worker serves and makes, or where it is instead of in shutdown(); "" if it only waits."""
    try:
        report = _C._inspect(name, True, False, _REPORT_S)
    except RuntimeError as exc:
        return f"{name} does not answer: {exc}."
    threads = {tid: reading.program_frame(thread) for tid, thread in reading.threads(report).items()}
    told = []
    for row in reading.rows(report, "calls_in"):
        if "INSPECT" not in str(row.get("kind")) and not str(row.get("function")).startswith("torchrpc.rpc.api._"):
            at = reading.place(threads.get(int(reading.number(row, "tid"))))
            told.append(f"serves {row.get('function')} for {row.get('from')} since {_age(row)}{at and f', in {at}'}")
    for row in reading.rows(report, "calls_out"):
        if "INSPECT" not in str(row.get("kind")):
            told.append(f"waits for the reply of {row.get('to')} since {_age(row)}")
    if told:
        return f"{name} {reading.listed(told)}."
    waits = [reading.table(thread, "waits").get("kind") for thread in reading.rows(report, "threads")]
    if is_in_shutdown or "barrier" in waits:
        return ""
    at = reading.place(threads.get(int(reading.number(reading.table(report, "worker"), "pid"))))
    return f"{name} serves no call and has not called shutdown(){at and f': it is in {at}'}."


def _age(row: reading.Report) -> str:
    return reading.age(reading.number(row, "age_s"))


def answer_served_calls(agent: Any, limit_s: float) -> bool:
    """Refuse new calls, and give functions that serve other workers 5 seconds to answer, or `limit_s` if that is less.

    The agent waits no longer than `limit_s` seconds from now for other workers, here and in stop_agent().

    Returns:
        bool: whether less than `limit_s` seconds have passed.
    """
    if not isinstance(agent, TensorPipeAgent):
        return True
    deadline = time.monotonic() + limit_s
    try:
        while not agent._drain(max(deadline - time.monotonic(), 0.0), _SIGNAL_CHECK_S):
            pass
    except BaseException:  # a signal handler has raised: stop_agent() should not wait for other workers, either
        agent._drain(0.0, 0.0)
        raise
    return time.monotonic() < deadline


def let_lost_workers_exit_first(agent: Any) -> None:
    """Wait, at the end of a process, so that a worker whose end may be the cause of this one exits before it."""
    if not isinstance(agent, TensorPipeAgent):
        return
    deadline = time.monotonic() + EXIT_ANSWER_S
    while not (has_lost := _has_lost_a_worker(agent)) and agent._is_peer_ending() and time.monotonic() < deadline:
        time.sleep(_END_CHECK_S)
    if has_lost:
        time.sleep(EXIT_AFTER_LOSS_S)


def _has_lost_a_worker(agent: TensorPipeAgent) -> bool:
    return len(agent._living_workers()) < len(agent.get_worker_infos())


def stop_agent(agent: Any, grace_s: float) -> None:
    """Stop the agent, after functions that other workers called here have returned.

    After `grace_s` seconds, or when a signal handler raises, the functions are abandoned: their threads go on, without
    RPC. Before that, the other workers have time to read the answers to their calls.
    """
    if not isinstance(agent, TensorPipeAgent):
        agent.shutdown()
        return
    try:
        while not agent._leave(_SIGNAL_CHECK_S):
            pass
        deadline = time.monotonic() + grace_s
        while not agent.shutdown(_SIGNAL_CHECK_S):
            if time.monotonic() >= deadline:
                name = agent.get_worker_info().name
                logger.warning("%s ends while functions still run that other workers have called.", name)
                agent._abandon()
                return
    except BaseException:
        agent._abandon()
        raise
