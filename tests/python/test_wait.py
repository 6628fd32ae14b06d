"""`torchrpc.wait`: some of many futures."""

import gc
import threading
import time
import weakref

import pytest
import torch

import torchrpc
import torchrpc.rpc as rpc
from torchrpc.rpc._calls import waiting
from torchrpc.testing import workers


def made(n):
    return [torch.futures.Future() for _ in range(n)]


def in_a_thread(run):
    """Starts a wait in a thread; returns a function that waits for its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()

    def result():
        thread.join(10)
        return results[0]

    return result


def test_ready_futures_are_in_the_order_of_the_argument():
    futures = made(4)
    futures[3].set_result(3)
    futures[1].set_result(1)
    assert torchrpc.wait(futures, num_returns=2) == ([futures[1], futures[3]], [futures[0], futures[2]])


def test_no_more_than_num_returns_are_ready():
    futures = made(3)
    for future in futures:
        future.set_result(None)
    assert torchrpc.wait(futures) == (futures[:1], futures[1:])


@pytest.mark.parametrize("num_returns", [1, 3, 8])
def test_it_wakes_when_enough_are_done(num_returns):
    futures = made(8)
    waiting = in_a_thread(lambda: torchrpc.wait(futures, num_returns=num_returns, timeout=10))
    for future in futures[8 - num_returns :]:
        future.set_result(None)
    assert waiting() == (futures[8 - num_returns :], futures[: 8 - num_returns])


def test_a_timeout_returns_fewer_than_num_returns():
    futures = made(3)
    futures[2].set_result(None)
    start = time.monotonic()
    assert torchrpc.wait(futures, num_returns=2, timeout=0.05) == (futures[2:], futures[:2])
    assert 0.05 <= time.monotonic() - start < 5


def test_a_timeout_of_zero_only_checks():
    futures = made(2)
    assert torchrpc.wait(futures, timeout=0) == ([], futures)
    futures[1].set_result(None)
    assert torchrpc.wait(futures, timeout=0) == (futures[1:], futures[:1])


def test_an_infinite_timeout_is_no_limit():
    (future,) = made(1)
    waiting = in_a_thread(lambda: torchrpc.wait([future], timeout=float("inf")))
    future.set_result(None)
    assert waiting() == ([future], [])


def test_a_failed_call_is_ready():
    futures = made(2)
    futures[1].set_exception(ValueError("Expected error"))
    (failed,), _ = torchrpc.wait(futures)
    with pytest.raises(ValueError, match="Expected error"):
        failed.wait()


def test_any_iterable_will_do():
    futures = made(2)
    futures[0].set_result(None)
    assert torchrpc.wait(dict.fromkeys(futures)) == torchrpc.wait(iter(futures)) == (futures[:1], futures[1:])


def test_of_no_futures_none_are_ready():
    assert torchrpc.wait([]) == ([], [])


def test_a_future_twice_is_refused():
    (future,) = made(1)
    with pytest.raises(ValueError, match="same future twice"):
        torchrpc.wait([future, future])


@pytest.mark.parametrize("num_returns", [0, -1, 3])
def test_num_returns_out_of_range_is_refused(num_returns):
    with pytest.raises(ValueError, match=f"from 1 to the number of futures, 2, but is {num_returns}"):
        torchrpc.wait(made(2), num_returns=num_returns)


def test_arguments_of_other_types_are_refused():
    with pytest.raises(TypeError, match=r"takes futures, .* but got a int"):
        torchrpc.wait([1])
    with pytest.raises(TypeError, match="num_returns must be an int, but is a float"):
        torchrpc.wait(made(1), num_returns=1.0)
    with pytest.raises(TypeError, match="timeout must be a number of seconds, but is a str"):
        torchrpc.wait(made(1), timeout="1")
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout must not be negative"):
            torchrpc.wait(made(1), timeout=timeout)


def test_many_threads_wait_for_the_same_futures():
    futures = made(20)
    waiting = [in_a_thread(lambda n=n: torchrpc.wait(futures, num_returns=n, timeout=10)) for n in range(1, 21)]
    setters = [in_a_thread(lambda future=future: future.set_result(None)) for future in futures]
    for done in setters:
        done()
    assert [len(done()[0]) for done in waiting] == list(range(1, 21))


def test_repeated_waits_leave_nothing_behind():
    (future,) = made(1)
    for _ in range(100):
        torchrpc.wait([future], timeout=1e-6)
    completion = waiting._completions[future]
    assert not completion._waiters
    gone = weakref.ref(future)
    del future
    gc.collect()
    assert gone() is None
    assert completion not in waiting._completions.values()


_told = threading.Event()


def return_when_told(value):
    assert _told.wait(60)
    return value


def tell():
    _told.set()


def fail():
    raise ValueError("Expected error")


def test_calls_and_their_then_futures_can_be_waited_for():
    with workers(2) as (_, there):
        slow, quick = rpc.rpc_async(there, return_when_told, (5,)), rpc.rpc_async(there, torch.add, (1, 2))
        assert rpc.wait([slow, quick]) == ([quick], [slow])
        later = slow.then(lambda future: future.wait() + 1)
        rpc.rpc_sync(there, tell)
        assert rpc.wait([slow, later], num_returns=2, timeout=60) == ([slow, later], [])
        (failed,), _ = rpc.wait([rpc.rpc_async(there, fail)])
        with pytest.raises(ValueError, match="Expected error"):
            failed.wait()


def test_it_works_without_the_extension():
    assert torchrpc.wait is rpc.wait
