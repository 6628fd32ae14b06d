"""Futures: functions that return one, callbacks, and coroutines that await one."""

import asyncio
import threading
import time

import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc.testing import workers


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(3, num_worker_threads=4) as names:
        yield names


@rpc.functions.async_execution
def add_there(to, x, y, z):
    return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda fut: fut.wait() + z)


@rpc.functions.async_execution
def set_from_a_thread(value):
    future = torch.futures.Future()
    threading.Timer(0.02, future.set_result, [value]).start()
    return future


@rpc.functions.async_execution
def fail_later():
    future = torch.futures.Future()
    threading.Timer(0.02, future.set_exception, [ValueError("later")]).start()
    return future


@rpc.functions.async_execution
def fail_at_once():
    raise RuntimeError("Expected error")


@rpc.functions.async_execution
def no_future():
    return 5


def sleep(seconds):
    time.sleep(seconds)  # the function under test is slow
    return seconds


may_end = threading.Event()


def last_until_told():
    """Run until let_end() is called on this worker."""
    assert may_end.wait(50)
    may_end.clear()
    return "ended"


def let_end():
    may_end.set()


def fail():
    raise ValueError("Expected error")


MODES = [
    lambda *args: rpc.rpc_sync(*args),
    lambda *args: rpc.rpc_async(*args).wait(),
    lambda *args: rpc.remote(*args).to_here(),
]
each_mode = pytest.mark.parametrize("call", MODES, ids=["rpc_sync", "rpc_async", "remote"])


@each_mode
def test_the_caller_gets_the_value_of_the_future(call):
    assert torch.equal(call("worker1", add_there, ("worker2", torch.ones(2), 1, 2)), torch.full((2,), 4.0))
    assert call("worker1", set_from_a_thread, ({"a": 1},)) == {"a": 1}


@each_mode
def test_the_caller_gets_the_error_of_the_future(call):
    with pytest.raises(ValueError, match="later"):
        call("worker1", fail_later)
    with pytest.raises(RuntimeError, match="Expected error"):
        call("worker1", fail_at_once)


@rpc.functions.async_execution
def forget_the_future():
    return torch.futures.Future()


def test_a_future_that_is_destroyed_without_a_result_is_an_error():
    text = "On WorkerInfo.*worker1.*The future that the function returned was destroyed before it had a result"
    with pytest.raises(RuntimeError, match=f"(?s){text}"):
        rpc.rpc_sync("worker1", forget_the_future)
    with pytest.raises(RuntimeError, match=f"(?s){text}"):
        rpc.remote("worker1", forget_the_future).to_here()


@each_mode
def test_a_function_that_returns_no_future_is_an_error(call):
    with pytest.raises(
        RuntimeError,
        match=r"Functions decorated with @rpc\.async_function must return a torch\.futures\.Future object,",
    ):
        call("worker1", no_future)


@each_mode
def test_an_async_lambda_works(call):
    assert call("worker1", rpc.functions.async_execution(lambda x: set_from_a_thread(x)), (3,)) == 3


def test_functions_that_wait_occupy_no_thread():
    futures = [rpc.rpc_async("worker1", set_from_a_thread, (i,)) for i in range(100)]
    assert torch.futures.wait_all(futures) == list(range(100))


def test_the_result_is_torchs_own_future_with_callbacks():
    future = rpc.rpc_async("worker1", sleep, (0.01,))
    assert isinstance(future, torch._C.Future)
    seen = threading.Event()
    future.add_done_callback(lambda fut: seen.set())
    assert future.then(lambda fut: fut.wait() + 1).then(lambda fut: fut.wait() + 1).wait() == 2.01
    assert seen.wait(10) and future.done() and future.value() == 0.01
    with pytest.raises(RuntimeError, match="Future can only be marked completed once"):
        future.set_result(1)


def test_the_repr_of_a_future_tells_function_worker_and_state():
    slow = rpc.rpc_async("worker2", last_until_told)
    assert repr(slow) == "Future(last_until_told on worker2, pending)"
    rpc.rpc_sync("worker2", let_end)
    slow.wait()
    assert repr(slow) == "Future(last_until_told on worker2, done)"
    failing = rpc.rpc_async("worker1", fail)
    with pytest.raises(ValueError):
        failing.wait()
    assert repr(failing) == "Future(fail on worker1, failed)"
    assert repr(rpc.rpc_async("worker1", torch.add, (1, 2))).startswith("Future(")
    assert "lambda" in repr(rpc.rpc_async("worker1", lambda: None))
    assert repr(rpc.rpc_async("worker1", Callable())).startswith("Future(a Callable on worker1")


class Callable:
    def __call__(self):
        return 1


def test_wait_all_raises_the_first_error():
    futures = [rpc.rpc_async("worker1", sleep, (0.01,)), rpc.rpc_async("worker1", fail)]
    with pytest.raises(ValueError, match="Expected error"):
        torch.futures.wait_all(futures)


def test_wait_all_returns_the_values_of_all_kinds_of_futures_in_order():
    own = torch.futures.Future()
    own.set_result("mine")
    then = rpc.rpc_async("worker1", sleep, (0.01,)).then(lambda done: done.wait() + 1)
    local = torch.futures.Future()
    timer = threading.Timer(0.02, lambda: local.set_result("late"))
    timer.start()
    slow = rpc.rpc_async("worker2", sleep, (0.03,))
    assert torch.futures.wait_all([slow, own, then, local, own]) == [0.03, "mine", 1.01, "late", "mine"]
    assert torch.futures.wait_all([]) == []
    timer.join()


def test_wait_all_does_not_wait_for_others_after_an_error():
    never = torch.futures.Future()
    failing = rpc.rpc_async("worker1", fail)
    with pytest.raises(ValueError, match="Expected error"):
        torch.futures.wait_all([never, failing])
    with pytest.raises(ValueError, match="Expected error"):  # it has failed already
        torch.futures.wait_all([never, failing])
    assert not never.done()


def test_wait_all_accepts_only_futures():
    with pytest.raises(TypeError):
        torch.futures.wait_all([rpc.rpc_async("worker1", sleep, (0.01,)), 3])


def test_a_coroutine_awaits_calls():
    async def main():
        one = await rpc.rpc_async("worker1", sleep, (0.01,))
        many = await asyncio.gather(*(rpc.rpc_async("worker2", sleep, (0.001 * i,)) for i in range(20)))
        rref = rpc.remote("worker1", list, ([1, 2],))
        return one, many, await rref.rpc_async().copy()

    assert asyncio.run(main()) == (0.01, [0.001 * i for i in range(20)], [1, 2])


def test_the_event_loop_runs_while_a_call_is_awaited():
    async def main():
        call = asyncio.ensure_future(rpc.rpc_async("worker1", last_until_told))
        for _ in range(3):
            await asyncio.sleep(0.01)  # the loop serves another task during the call
            assert not call.done()
        await rpc.rpc_async("worker1", let_end)
        return await call

    assert asyncio.run(main()) == "ended"


def test_await_raises_the_error_of_the_call():
    async def main():
        with pytest.raises(ValueError, match="Expected error"):
            await rpc.rpc_async("worker1", fail)
        done = rpc.rpc_async("worker1", fail)
        with pytest.raises(ValueError, match="Expected error"):
            done.wait()
        with pytest.raises(ValueError, match="Expected error"):
            await done

    asyncio.run(main())


def test_a_cancelled_wait_for_a_shielded_call_affects_neither_the_call_nor_the_event_loop():
    async def main():
        future = rpc.rpc_async("worker1", last_until_told)
        call = asyncio.ensure_future(future)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(call), 0.01)
        assert not future.done()
        await rpc.rpc_async("worker1", let_end)
        return await call

    assert asyncio.run(main()) == "ended"


def test_an_event_loop_may_close_before_the_call_ends():
    async def main():
        future = rpc.rpc_async("worker1", last_until_told)
        waiting = asyncio.ensure_future(future)
        await asyncio.sleep(0)  # lets `waiting` begin to wait
        return future, waiting

    loop = asyncio.new_event_loop()
    future, waiting = loop.run_until_complete(main())
    loop.close()
    rpc.rpc_sync("worker1", let_end)
    assert future.wait() == "ended"
    assert not waiting.done()


def test_event_loops_of_several_threads_can_await():
    results = []

    def run(n):
        async def main():
            return await rpc.rpc_async("worker1", sleep, (0.001 * n,))

        results.append(asyncio.run(main()))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0.0, 0.001, 0.002, 0.003]


def test_a_future_of_the_program_can_be_awaited():
    async def main():
        future = torch.futures.Future()
        threading.Timer(0.02, future.set_result, [5]).start()
        return await future

    assert asyncio.run(main()) == 5
