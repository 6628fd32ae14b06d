"""Failed calls whose futures nobody has looked at are logged, once each; all others are not."""

import asyncio
import contextlib
import gc
import threading
from pathlib import Path

import pytest
import torch
from test_slow_calls import Records
from waiting import eventually

import torchrpc
import torchrpc.rpc as rpc
from torchrpc.rpc.functions import async_execution
from torchrpc.testing import run_ranks, workers


def fail(text="it is broken"):
    raise ValueError(text)


def succeed():
    return 1


_event = threading.Event()


def fail_later():
    _event.wait(60)
    raise ValueError("it broke later")


def let_fail():
    _event.set()


@pytest.fixture(scope="module")
def group():
    with workers(2):
        yield


@pytest.fixture
def records():
    import logging

    handler = Records()
    handler.addFilter(lambda record: record.levelno == logging.WARNING)  # not the errors of functions that ran here
    logging.getLogger("torchrpc.calls").addHandler(handler)
    yield handler
    logging.getLogger("torchrpc.calls").removeHandler(handler)


def nothing_more(records, count=0):
    """No other record is on its way: a failure that is forgotten after them is logged after them."""
    marker = rpc.rpc_async("worker1", fail, args=("the last one",))
    while not marker.done():
        pass
    del marker
    records.wait_for(count + 1)
    texts = records.texts()
    assert len(texts) == count + 1 and "the last one" in texts[-1]
    return texts[:-1]


def test_a_failure_that_nobody_waited_for_is_logged_once(group, records):
    rpc.rpc_async("worker1", fail)
    records.wait_for(1)
    [text] = nothing_more(records, 1)
    assert text.startswith("nobody waited for the call of fail on worker1 that worker0 made, and it failed: ")
    assert "ValueError" in text and "it is broken" in text
    record = records.records[0]
    assert (record.worker, record.peer, record.function) == ("worker0", "worker1", "fail")


def test_a_future_that_is_dropped_after_its_failure_is_logged_then(group, records):
    future = rpc.rpc_async("worker1", fail)
    while not future.done():
        pass
    rpc.rpc_sync("worker1", succeed)
    assert records.texts() == []
    del future
    records.wait_for(1)
    nothing_more(records, 1)


def test_a_future_that_is_dropped_before_its_failure_is_logged_then(group, records):
    rpc.rpc_async("worker1", fail_later)
    gc.collect()
    rpc.rpc_sync("worker1", succeed)
    assert records.texts() == []
    rpc.rpc_sync("worker1", let_fail)
    records.wait_for(1)
    assert "it broke later" in records.texts()[0]


def value_of(future):
    while not future.done():
        pass
    return future.value()


def give_callback(future):
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait(20)


async def awaited(future):
    return await future


@async_execution
def returned_to_the_caller():
    return rpc.rpc_async("worker0", fail)


LOOKS = {
    "wait": lambda future: future.wait(),
    "value": value_of,
    "then": lambda future: future.then(lambda done: None).wait(),
    "add_done_callback": give_callback,
    "await": lambda future: asyncio.run(awaited(future)),
    "wait_all": lambda future: torch.futures.wait_all([future]),
    "collect_all": lambda future: torch.futures.collect_all([future]).wait(),
    "torchrpc.wait": lambda future: torchrpc.wait([future]),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_failure_that_somebody_looked_at_is_not_logged(group, records, look):
    future = rpc.rpc_async("worker1", fail)
    with contextlib.suppress(ValueError):
        LOOKS[look](future)
    del future
    gc.collect()
    nothing_more(records)


def test_of_several_failures_that_were_waited_for_none_is_logged(group, records):
    for gather in (torch.futures.wait_all, lambda futures: torch.futures.collect_all(futures).wait()):
        with pytest.raises(ValueError):
            gather([rpc.rpc_async("worker1", fail) for _ in range(5)])
    nothing_more(records)


def test_a_failure_that_goes_to_the_caller_is_not_logged(group, records):
    with pytest.raises(ValueError):
        rpc.rpc_sync("worker1", returned_to_the_caller)
    nothing_more(records)


def test_calls_that_succeed_and_synchronous_ones_are_not_logged(group, records):
    rpc.rpc_async("worker1", succeed)
    with pytest.raises(ValueError):
        rpc.rpc_sync("worker1", fail)
    nothing_more(records)


def test_a_result_that_cannot_be_sent_is_a_failure(group, records):
    rpc.rpc_async("worker1", threading.Lock)
    records.wait_for(1)
    nothing_more(records, 1)


def forget_at_the_end(rank):
    import logging

    handler = Records()
    logging.getLogger("torchrpc.calls").addHandler(handler)
    if rank == 0:
        rpc.rpc_async("worker1", fail_later)
    rpc.shutdown(graceful=False)
    return handler.texts()


def join_and_forget(rank, url, ended):
    rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url)
    )
    if rank == 1:
        eventually(Path(ended).exists)  # otherwise the loss of this worker might end the call
        let_fail()
    texts = forget_at_the_end(rank)
    Path(ended).touch()
    return texts


def test_calls_that_a_shutdown_ends_are_not_logged(tmp_path):
    results = run_ranks(join_and_forget, 2, f"file://{tmp_path}/store", f"{tmp_path}/ended", init=False)
    assert results[0] == []
    assert not any("nobody waited" in text for text in results[1])


def forget_with_place(rank):
    import logging

    handler = Records()
    logging.getLogger("torchrpc.calls").addHandler(handler)
    if rank == 0:
        rpc.rpc_async("worker1", fail)
        handler.wait_for(1)
        return handler.records[0].made_at, handler.texts()[0]
    return None


def test_the_place_of_the_call_is_logged_if_it_is_kept():
    [(made_at, text), _] = run_ranks(forget_with_place, 2, env={"TORCHRPC_CALL_SITES": "1"})
    line = forget_with_place.__code__.co_firstlineno + 6
    assert made_at == f"{__file__}:{line}"
    assert f"that worker0 made at {made_at}, and it failed" in text
