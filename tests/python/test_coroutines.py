"""`async def` functions on the callee, and the caller's futures in asyncio."""

import asyncio
import collections.abc
import concurrent.futures
import sys
import threading
import time

import pytest
import torch
from waiting import eventually

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.testing import run_ranks, workers


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(2, num_worker_threads=4, propagate_deadlines=True) as names:
        yield names


async def double(value, delay_s=0.0):
    await asyncio.sleep(delay_s)  # the function under test is slow
    return 2 * value


async def fail():
    await asyncio.sleep(0)  # it fails after it has been suspended
    raise KeyError("not there")


class HidingError(Exception):
    """Has attributes in the places of methods."""

    def __init__(self):
        super().__init__("hiding")
        self.with_traceback = self.add_note = None


async def fail_with_attributes():
    raise HidingError


async def call_back(value):
    return await rpc.rpc_async("worker0", torch.mul, args=(value, 3))


async def multiply_back_and_forth(value, factor):
    for _ in range(3):
        await asyncio.sleep(0.001)  # it is suspended between the calls
        value = await rpc.rpc_async("worker0", torch.mul, args=(value, factor))
    return value


async def grad_mode_after_a_pause(enabled):
    with torch.set_grad_enabled(enabled):
        await asyncio.sleep(0.02)  # coroutines with the other mode run meanwhile
        return torch.is_grad_enabled()


async def call_without_end():
    begin = time.monotonic()
    try:
        await rpc.rpc_async("worker0", double, args=(1, 60.0))
    finally:
        failed_after.append(time.monotonic() - begin)


async def name_of_thread():
    return threading.current_thread().name


async def shut_down():
    rpc.shutdown()


async def leave():
    sys.exit("enough")


def leave_now():
    sys.exit("enough")


async def returns_a_generator():
    return (i for i in range(3))


def generator():
    yield 1


async def async_generator():
    yield 1


failed_after = []


def last_failure():
    return failed_after[-1:]


class Environment:
    def __init__(self):
        self.steps = 0

    async def step(self, last=0):
        """Make a step; return how many there are when there are `last` of them."""
        self.steps += 1
        while self.steps < last:
            await asyncio.sleep(0.01)  # the function under test is slow
        return self.steps


MODES = [
    lambda *args: rpc.rpc_sync(*args),
    lambda *args: rpc.rpc_async(*args).wait(),
    lambda *args: rpc.remote(*args).to_here(),
]
each_mode = pytest.mark.parametrize("call", MODES, ids=["rpc_sync", "rpc_async", "remote"])


@each_mode
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_the_caller_gets_what_the_coroutine_returns(call, to):
    assert call(to, double, (21,)) == 42
    assert torch.equal(call(to, double, (torch.ones(2), 0.01)), torch.full((2,), 2.0))
    with pytest.raises(KeyError, match="not there") as raised:
        call(to, fail)
    assert "rpc/_calls/coroutines.py" not in str(raised.value)
    with pytest.raises(HidingError, match="hiding"):
        call(to, fail_with_attributes)


def test_coroutines_run_at_once_on_one_thread():
    begin = time.monotonic()
    futures = [rpc.rpc_async("worker1", double, (i, 0.5)) for i in range(200)]
    assert torch.futures.wait_all(futures) == [2 * i for i in range(200)]
    assert time.monotonic() - begin < 50  # one after the other they take 100
    assert {rpc.rpc_sync("worker1", name_of_thread) for _ in range(5)} == {"torchrpc-asyncio"}


def test_coroutines_may_call_back_and_methods_may_be_coroutines():
    assert torch.equal(rpc.rpc_sync("worker1", call_back, (torch.ones(2),)), torch.full((2,), 3.0))
    environment = rpc.remote("worker1", Environment)
    assert environment.rpc_sync().step() == 1
    steps = [environment.rpc_async().step(4) for _ in range(3)]
    assert sorted(torch.futures.wait_all(steps)) == [4, 4, 4]
    assert environment.remote().step().to_here() == 5


def test_each_step_runs_in_the_autograd_context_of_its_call():
    """The steps of three calls alternate on the thread; each records only in its own context."""

    def differentiate(factor):
        x = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", multiply_back_and_forth, (x, factor)).sum()
            dist_autograd.backward(context_id, [loss])
            return dist_autograd.get_gradients(context_id)[x].tolist()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(differentiate, [1, 2, 3])) == [[1.0, 1.0], [8.0, 8.0], [27.0, 27.0]]


def test_each_step_has_the_grad_mode_of_its_coroutine():
    modes = [i % 2 == 0 for i in range(20)]
    futures = [rpc.rpc_async("worker1", grad_mode_after_a_pause, (mode,)) for mode in modes]
    assert torch.futures.wait_all(futures) == modes


def test_calls_of_a_coroutine_inherit_its_deadline():
    with pytest.raises(rpc.RpcTimeoutError):
        rpc.rpc_sync("worker1", call_without_end, timeout=2)  # the coroutine begins in that time
    assert eventually(lambda: rpc.rpc_sync("worker1", last_failure))[0] < 30


def test_shutdown_in_a_coroutine_is_an_error():
    with pytest.raises(rpc.RpcError, match=r"shutdown\(\) cannot be called by a function that another worker"):
        rpc.rpc_sync("worker1", shut_down)
    assert rpc.rpc_sync("worker1", double, (1,)) == 2


async def await_a_cancelled_task():
    task = asyncio.ensure_future(asyncio.sleep(10))  # cancelled before it begins
    task.cancel()
    await task


def test_a_cancellation_of_the_program_is_not_the_end_of_the_worker():
    with pytest.raises(rpc.CancelledError, match="awaited a task that was cancelled"):
        rpc.rpc_sync("worker1", await_a_cancelled_task)
    assert rpc.rpc_sync("worker1", double, (1,)) == 2


@pytest.mark.parametrize("function", [leave, leave_now])
def test_a_function_that_exits_fails_its_call_alone(function):
    with pytest.raises(rpc.RemoteException, match=r"SystemExit.*enough") as caught:
        rpc.rpc_sync("worker1", function)
    assert (caught.value.type_name, caught.value.message) == ("builtins.SystemExit", "enough")
    assert rpc.rpc_sync("worker1", double, (1,)) == 2


@pytest.mark.parametrize("function", [generator, async_generator, returns_a_generator])
def test_a_generator_is_refused_with_the_remedy(function):
    with pytest.raises(rpc.SerializationError, match=r"Return a list of its items, or call .* rpc\.remote\(\)"):
        rpc.rpc_sync("worker1", function)
    rref = rpc.remote("worker1", generator)
    assert rpc.rpc_sync("worker1", lambda rref: list(rref.local_value()), (rref,)) == [1]


# --- the caller's futures ---


def test_a_future_is_a_coroutine():
    future = rpc.rpc_async("worker1", double, (1,))
    assert isinstance(future, collections.abc.Awaitable) and asyncio.iscoroutine(future)
    assert future.wait() == 2
    with pytest.raises(RuntimeError, match="no running event loop"):
        future.send(None)
    assert asyncio.run(rpc.rpc_async("worker1", double, (3, 0.05))) == 6


def test_asyncio_takes_futures_everywhere():
    async def program():
        task = asyncio.create_task(rpc.rpc_async("worker1", double, (5, 0.05)))
        shared = rpc.rpc_async("worker1", double, (6, 0.05))
        gathered = await asyncio.gather(rpc.rpc_async("worker1", double, (4,)), task, shared, shared)
        waited = await asyncio.wait_for(rpc.rpc_async("worker1", double, (8,)), 60)
        many = [asyncio.create_task(rpc.rpc_async("worker1", double, (i, 0.01))) for i in range(50)]
        done, pending = await asyncio.wait(many, timeout=60)
        assert not pending and sum(each.result() for each in done) == 2 * sum(range(50))
        return gathered, waited, await asyncio.shield(rpc.rpc_async("worker1", double, (9,)))

    assert asyncio.run(program()) == ([8, 10, 12, 12], 16, 18)


def test_two_tasks_may_wait_for_one_future():
    async def program():
        future = rpc.rpc_async("worker1", double, (5, 0.1))
        return await asyncio.gather(asyncio.create_task(future), asyncio.create_task(future))

    assert asyncio.run(program()) == [10, 10]


def test_errors_and_time_outs_end_the_task():
    async def program():
        with pytest.raises(KeyError, match="not there"):
            await asyncio.create_task(rpc.rpc_async("worker1", fail))
        begin = time.monotonic()
        slow = rpc.rpc_async("worker1", double, (1, 60.0))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.create_task(slow), 0.05)
        assert time.monotonic() - begin < 30
        with pytest.raises(rpc.CancelledError):
            await slow

    asyncio.run(program())


# --- the end ---


async def sleep_for_ever(begun):
    begun.touch()
    await asyncio.sleep(1000)  # the function under test does not end


def end_while_a_coroutine_runs(rank, path, url):
    options = rpc.TensorPipeRpcBackendOptions(init_method=url)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        future = rpc.rpc_async("worker1", sleep_for_ever, (path,))
        eventually(path.exists)
        with pytest.raises(rpc.RpcError):  # the answer that it was cancelled, or the loss of the worker
            future.wait()
        rpc.shutdown(graceful=False)
        return None
    eventually(path.exists)
    begin = time.monotonic()
    rpc.shutdown(graceful=False)
    return time.monotonic() - begin, [t.name for t in threading.enumerate()]


def test_coroutines_are_cancelled_when_their_worker_ends(tmp_path):
    url = f"file://{tmp_path}/store"
    _, (took, threads) = run_ranks(end_while_a_coroutine_runs, 2, tmp_path / "begun", url, init=False)
    assert took < 30  # it gives calls that it serves 5 seconds to answer
    assert "torchrpc-asyncio" not in threads
