"""A signal such as Ctrl-C's ends a wait at once and leaves no state behind."""

import contextlib
import operator
import os
import signal
import threading
import time

import pytest
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc._C import _rref_context_get_debug_info
from torchrpc.testing import workers


class Interrupted(Exception):
    pass


def slow_rref():
    time.sleep(1)  # the function under test is slow
    return rpc.RRef(1)


running, may_end = 0, threading.Event()


def rref_at_the_end():
    """Return an RRef when let_end() has been called on this worker."""
    global running
    running += 1
    may_end.wait(60)
    rref = rpc.RRef(1)
    running -= 1
    return rref


def let_end():
    may_end.set()


def owns_none_at_the_end():
    return running == 0 and int(_rref_context_get_debug_info()["num_owner_rrefs"]) == 0


@pytest.fixture
def interrupt_after():
    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: rpc.rpc_sync("worker1", rref_at_the_end), id="rpc_sync"),
        pytest.param(lambda: rpc.rpc_async("worker1", rref_at_the_end).wait(), id="future"),
        pytest.param(lambda: torch.futures.wait_all([rpc.rpc_async("worker1", rref_at_the_end)]), id="wait_all"),
        pytest.param(lambda: rpc.remote("worker1", rref_at_the_end).to_here(), id="to_here"),
    ],
)
def test_a_signal_ends_the_wait_for_a_call(interrupt_after, call):
    with workers(2):
        start = time.monotonic()
        with pytest.raises(Interrupted):
            interrupt_after(0.2)
            call()
        assert time.monotonic() - start < 20  # the function waits for longer, and so does its caller
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)).item() == 2
        # The RRef that arrives later is released.
        rpc.rpc_sync("worker1", let_end)
        eventually(lambda: rpc.rpc_sync("worker1", owns_none_at_the_end))


def interrupt_and_return(pid, delay_s=0.0):
    time.sleep(delay_s)  # the function under test is slow
    os.kill(pid, signal.SIGALRM)
    return 1


def test_a_future_whose_wait_was_interrupted_as_its_reply_came_can_be_waited_for_again(interrupt_after):
    with workers(2):
        for _ in range(50):
            future = rpc.rpc_async("worker1", interrupt_and_return, args=(os.getpid(),))
            with contextlib.suppress(Interrupted):
                future.wait()
                time.sleep(0.01)  # the signal may come after the reply
            done = []
            waiting = threading.Thread(target=lambda future=future, done=done: done.append(future.wait()), daemon=True)
            waiting.start()
            waiting.join(10)
            assert done == [1]


def test_two_threads_wait_for_a_future_and_one_of_them_is_interrupted(interrupt_after):
    with workers(2):
        for _ in range(20):
            future = rpc.rpc_async("worker1", interrupt_and_return, args=(os.getpid(), 0.1))
            done = []
            waiting = threading.Thread(target=lambda future=future, done=done: done.append(future.wait()), daemon=True)
            waiting.start()
            with contextlib.suppress(Interrupted):
                future.wait()
                time.sleep(0.01)  # the signal may come after the reply
            waiting.join(10)
            assert done == [1]


def test_a_handler_of_a_signal_makes_calls_itself():
    with workers(2):
        seen = []
        before = signal.signal(signal.SIGALRM, lambda *_: seen.append(rpc.rpc_sync("worker1", operator.neg, (3,))))
        try:
            future = rpc.rpc_async("worker1", slow_rref)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            assert future.wait().to_here() == 1
            assert seen == [-3]
        finally:
            signal.signal(signal.SIGALRM, before)
