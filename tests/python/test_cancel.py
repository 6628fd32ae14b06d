"""Cancelled calls: by the caller, by the end of an asyncio task, and by a time-out."""

import asyncio
import time

import pytest
import torch
from waiting import eventually, remains

import torchrpc
import torchrpc.rpc as rpc
from torchrpc.testing import run_ranks, workers

THREADS = 2


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(3, num_worker_threads=THREADS) as names:
        yield names


events: dict[str, list[str]] = {}  # what the functions of each test have noted in this process


def note(test, event):
    events.setdefault(test, []).append(event)


def noted(test):
    return events.get(test, [])


def poll(test):
    """Run until the call is cancelled."""
    note(test, "polls")
    wait_until_cancelled(test)


def wait_until_cancelled(test):
    end = time.monotonic() + 60
    while not torchrpc.cancelled() and time.monotonic() < end:
        time.sleep(0.001)  # as a program would
    note(test, f"cancelled: {torchrpc.cancelled()}")


def poll_and_touch(test, path):
    """Poll; the file tells that the function has begun. A call could not: its thread is replaced while it waits."""
    note(test, "polls")
    path.touch()
    wait_until_cancelled(test)


def call_poll(test, to):
    try:
        rpc.rpc_sync(to, poll, args=(test,))
    except Exception as error:
        note(test, type(error).__name__)
        raise


async def sleep(test, most_s=60):
    note(test, "sleeps")
    try:
        await asyncio.sleep(most_s)  # until it is cancelled
    except asyncio.CancelledError:
        note(test, f"cancelled: {torchrpc.cancelled()}")
        raise


async def await_poll(test, to):
    try:
        await rpc.rpc_async(to, poll, args=(test,))
    except asyncio.CancelledError:
        note(test, "cancelled")
        raise


async def finish_in_spite(test):
    try:
        await sleep(test)
    except asyncio.CancelledError:
        return await rpc.rpc_async("worker2", torch.add, args=(1, 1))


async def many(test, count):
    sleepers = [rpc.rpc_async("worker2", sleep, args=(test,)) for _ in range(count)]
    return await asyncio.gather(*sleepers)


def wait_for(test, worker, *expected):
    eventually(lambda: rpc.rpc_sync(worker, noted, args=(test,)) == list(expected))


def test_a_cancelled_call_fails_and_its_function_can_ask():
    future = rpc.rpc_async("worker1", poll, args=("asks",))
    wait_for("asks", "worker1", "polls")
    assert future.cancel()
    with pytest.raises(rpc.CancelledError, match="the call to worker1 was cancelled by its caller"):
        future.wait()
    assert future.done()
    wait_for("asks", "worker1", "polls", "cancelled: True")
    assert not future.cancel()


def test_a_call_that_has_ended_cannot_be_cancelled():
    future = rpc.rpc_async("worker1", torch.add, args=(1, 2))
    assert future.wait() == 3
    assert not future.cancel()
    assert future.wait() == 3
    assert not torch.futures.Future().cancel()
    assert not rpc.rpc_async("worker1", torch.add, args=(1, 2)).then(lambda done: done.wait()).cancel()


def test_nothing_is_cancelled_where_no_call_is_served():
    assert not torchrpc.cancelled()


def test_a_call_that_has_not_begun_does_not_run(tmp_path):
    paths = [tmp_path / str(i) for i in range(THREADS)]
    running = [rpc.rpc_async("worker1", poll_and_touch, args=("queued", path)) for path in paths]
    eventually(lambda: all(path.exists() for path in paths))  # no thread of worker1 is left for another call
    waiting = rpc.rpc_async("worker1", note, args=("queued", "the call that waited"))
    assert waiting.cancel()
    with pytest.raises(rpc.CancelledError):
        waiting.wait()
    for future in running:
        assert future.cancel()
    wait_for("queued", "worker1", "polls", "polls", "cancelled: True", "cancelled: True")


def test_calls_for_which_a_function_waits_end_over_several_workers():
    future = rpc.rpc_async("worker1", call_poll, args=("nested", "worker2"))
    wait_for("nested", "worker2", "polls")
    assert future.cancel()
    wait_for("nested", "worker1", "CancelledError")
    wait_for("nested", "worker2", "polls", "cancelled: True")


def test_a_call_to_oneself_is_cancelled_too():
    future = rpc.rpc_async("worker0", call_poll, args=("oneself", "worker1"))
    wait_for("oneself", "worker1", "polls")
    assert future.cancel()
    eventually(lambda: noted("oneself") == ["CancelledError"])
    wait_for("oneself", "worker1", "polls", "cancelled: True")


def test_a_coroutine_is_cancelled_where_it_awaits():
    future = rpc.rpc_async("worker1", sleep, args=("coroutine",))
    wait_for("coroutine", "worker1", "sleeps")
    assert future.cancel()
    wait_for("coroutine", "worker1", "sleeps", "cancelled: True")


def test_a_cancelled_coroutine_cancels_the_call_that_it_awaits():
    future = rpc.rpc_async("worker1", await_poll, args=("awaits", "worker2"))
    wait_for("awaits", "worker2", "polls")
    assert future.cancel()
    wait_for("awaits", "worker1", "cancelled")
    wait_for("awaits", "worker2", "polls", "cancelled: True")


def test_a_cancelled_coroutine_may_make_calls_while_it_ends():
    future = rpc.rpc_async("worker1", finish_in_spite, args=("cleans up",))
    wait_for("cleans up", "worker1", "sleeps")
    assert future.cancel()
    wait_for("cleans up", "worker1", "sleeps", "cancelled: True")
    with pytest.raises(rpc.CancelledError):  # though the coroutine has returned a value
        future.wait()


@pytest.mark.parametrize("how", ["await", "task of the future", "gather", "wait_for"])
def test_the_end_of_a_task_cancels_the_call_that_it_awaits(how):
    test = f"task: {how}"

    async def program():
        future = rpc.rpc_async("worker1", sleep, args=(test,))

        async def wait():
            return await future

        if how == "wait_for":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wait(), 2)  # the function begins in that time
            return
        task = asyncio.create_task(future if how == "task of the future" else wait())
        if how == "gather":
            task = asyncio.gather(task, asyncio.sleep(60))  # until it is cancelled
        await asyncio.sleep(0)  # the task begins to wait
        wait_for(test, "worker1", "sleeps")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(program())
    wait_for(test, "worker1", "sleeps", "cancelled: True")


def test_a_shielded_call_goes_on():
    async def program():
        future = rpc.rpc_async("worker1", sleep, args=("shielded",))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(future), 0.2)
        assert not future.done()
        wait_for("shielded", "worker1", "sleeps")
        assert future.cancel()

    asyncio.run(program())
    wait_for("shielded", "worker1", "sleeps", "cancelled: True")


def test_many_coroutines_are_cancelled_through_one():
    future = rpc.rpc_async("worker1", many, args=("many", 50))
    wait_for("many", "worker2", *["sleeps"] * 50)
    assert future.cancel()
    wait_for("many", "worker2", *["sleeps"] * 50, *["cancelled: True"] * 50)


def test_a_call_that_times_out_is_cancelled():
    with pytest.raises(rpc.RpcTimeoutError):
        rpc.rpc_sync("worker1", call_poll, args=("time-out", "worker2"), timeout=2)  # both functions begin
    wait_for("time-out", "worker1", "CancelledError")
    wait_for("time-out", "worker2", "polls", "cancelled: True")


def test_the_call_of_a_dropped_future_goes_on():
    rpc.rpc_async("worker1", note, args=("dropped", "done"))
    wait_for("dropped", "worker1", "done")


def test_a_call_that_may_be_repeated_is_cancelled_at_its_caller_only():
    future = rpc.rpc_async("worker1", sleep, args=("repeated", 5), idempotency_key="cancel")
    wait_for("repeated", "worker1", "sleeps")
    assert future.cancel()
    with pytest.raises(rpc.CancelledError):
        future.wait()
    remains(lambda: rpc.rpc_sync("worker1", noted, args=("repeated",)) == ["sleeps"])


def test_cancelled_calls_leave_nothing_behind():
    for _ in range(200):
        rpc.rpc_async("worker1", sleep, args=("left",)).cancel()
    assert rpc.rpc_sync("worker1", torch.add, args=(1, 1)) == 2
    eventually(lambda: rpc._get_current_rpc_agent().get_debug_info()["agent.num_pending_calls"] == "0")


def time_out(rank, options):
    rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(**options)
    )
    outcome = None
    if rank == 0:
        with pytest.raises(RuntimeError):
            rpc.rpc_sync("worker1", sleep_a_while, timeout=2)  # the function begins in that time
        outcome = eventually(lambda: rpc.rpc_sync("worker1", noted, args=("a while",)))
    rpc.shutdown()
    return outcome


async def sleep_a_while():
    try:
        await asyncio.sleep(5)  # longer than the time-out of the call
    except asyncio.CancelledError:
        note("a while", "cancelled")
        raise
    note("a while", "finished")


@pytest.mark.parametrize(
    ("options", "replaced", "expected"),
    [({}, False, "cancelled"), ({"cancel_on_timeout": False}, False, "finished"), ({}, True, "finished")],
)
def test_a_time_out_cancels_unless_torch_is_replaced_or_the_program_says_no(
    options, replaced, expected, tmp_path, monkeypatch
):
    if replaced:
        monkeypatch.setenv("TORCHRPC_REPLACE", "1")  # read when the new processes import torch
    options = {**options, "init_method": f"file://{tmp_path}/store"}
    assert run_ranks(time_out, 2, options, init=False, start_method="spawn", timeout=100)[0] == [expected]


kept_futures = []


@rpc.functions.async_execution
def never_complete():
    kept_futures.append(torch.futures.Future())
    return kept_futures[-1]


def complete_too_late():
    kept_futures.pop().set_result("late")


def time_out_and_leave(rank, options):
    rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(**options)
    )
    if rank == 0:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="more than set timeout"):
                rpc.rpc_sync("worker1", never_complete, timeout=0.2)
        rpc.rpc_sync("worker1", complete_too_late)  # has no effect on the call
    start = time.monotonic()
    rpc.shutdown()
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("options", "replaced"), [({}, False), ({"cancel_on_timeout": False}, False), ({}, True)], ids=str
)
def test_the_end_does_not_wait_for_a_future_for_which_no_caller_waits(options, replaced, tmp_path, monkeypatch):
    if replaced:
        monkeypatch.setenv("TORCHRPC_REPLACE", "1")  # read when the new processes import torch
    options = {**options, "init_method": f"file://{tmp_path}/store"}
    ended = run_ranks(time_out_and_leave, 2, options, init=False, start_method="spawn", timeout=100)
    assert max(ended) < 10  # it would wait for ever
