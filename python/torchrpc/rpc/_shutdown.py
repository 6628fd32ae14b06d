"""How the workers of a group of fixed size end together, and how this worker's agent is stopped.

Runs on the thread that calls `shutdown`, or at the exit of the process. It gets the functions that scripts replace in
`api` as arguments.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from torchrpc._C import TensorPipeAgent

from ._cpp_functions import wait_for_cpp_workers
from ._errors import WorkerLostError
from ._gather import LOST_WORKERS

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 1.0  # for functions that still run here when the process ends or is interrupted
EXIT_ANSWER_S = 3.0  # for the answers of functions that serve other workers when the process ends
_SIGNAL_CHECK_S = 0.1  # between two chances for Python to run signal handlers while the agent stops


def end_static_group(
    agent: Any, timeout: float, wait_all_workers: Callable[[], None], delete_rrefs: Callable[[], None]
) -> None:
    """Run the steps of a graceful shutdown; steps after the loss of a worker run without it.

    Args:
        timeout (float): seconds for each step that waits; 0: no limit.
        wait_all_workers: blocks until all Python workers have called shutdown.
        delete_rrefs: deletes this worker's references.

    Raises:
        WorkerLostError: a worker is lost. All steps have run, except those that need a store which is lost with rank 0.
        RuntimeError: a step failed or timed out; later steps have not run.
    """
    lost: list[str] = []
    for step, needs_store in (
        (wait_all_workers, False),
        (lambda: wait_for_cpp_workers(agent, timeout), True),
        (delete_rrefs, False),
        (lambda: agent.join(shutdown=True, timeout=timeout), True),
    ):
        # Rank 0 serves the store. If it is stopped (SIGSTOP), a request to the store would block.
        if lost and needs_store and agent.get_worker_info().id != 0 and agent._lost_among([0]):
            continue
        try:
            step()
        except WorkerLostError as exc:
            lost += vars(exc).get(LOST_WORKERS) or [exc.worker]
        except RuntimeError:  # the store may have ended with the lost worker
            if not lost:
                raise
    if lost:
        names = list(dict.fromkeys(lost))
        text = (
            f"{agent.get_worker_info().name} has shut down without {', '.join(names)}, lost before the group had ended."
        )
        raise WorkerLostError(text, names[0])


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
