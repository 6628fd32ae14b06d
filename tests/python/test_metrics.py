"""Counters of calls: torchrpc.observe.functions()."""

import threading

import pytest
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc import observe
from torchrpc.testing import run_ranks, workers


def double(x):
    return 2 * x


def fail():
    raise ValueError("no")


def wait_for(name):
    """Blocks until release() is called here with that name."""
    _event(name).wait(60)


def release(name):
    _event(name).set()


_events: dict = {}


def _event(name):
    return _events.setdefault(name, threading.Event())


def rows_of(to, side):
    """{function: row} of a worker."""
    rows = observe.functions() if to is None else rpc.rpc_sync(to, observe.functions)
    return {row.function: row for row in rows if row.side == side}


NAME = f"{__name__}."


def test_calls_are_counted_on_both_sides():
    with workers(2, metrics=True):
        for i in range(5):
            assert rpc.rpc_sync("worker1", double, args=(i,)) == 2 * i
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1000), 1))
        rref = rpc.remote("worker1", double, args=(torch.ones(2),))
        rref.to_here()
        eventually(rref.confirmed_by_owner)  # the value may arrive before the answer of the call that makes it
        out, inside = rows_of(None, "out"), rows_of("worker1", "in")
        for rows, peer in ((out, "worker1"), (inside, "worker0")):
            row = rows[NAME + "double"]
            assert (row.calls, row.in_flight, row.errors, row.peer) == (6, 0, {}, peer)
            assert 0 < row.p50_s <= row.p99_s and row.max_s <= row.p99_s * 1.001 and row.max_s <= row.total_s
            assert sum(count for _, count in row.buckets) == 6
            assert rows["aten::add"].calls == 1 and rows["aten::add"].reply_bytes >= 4000
            assert rows["aten::add"].request_bytes == out["aten::add"].request_bytes
            assert rows["PYTHON_RREF_FETCH_CALL"].calls == 1


def test_errors_are_counted_by_their_code():
    with workers(2, metrics=True):
        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                rpc.rpc_sync("worker1", fail)
        with pytest.raises(rpc.RpcTimeoutError):
            # Long enough for the function to begin: a call that times out before that does not run.
            rpc.rpc_sync("worker1", wait_for, args=("errors",), timeout=3)
        out, inside = rows_of(None, "out"), rows_of("worker1", "in")
        assert out[NAME + "fail"].errors == inside[NAME + "fail"].errors == {"user exception": 3}
        assert out[NAME + "wait_for"].errors == {"timeout": 1}
        assert inside[NAME + "wait_for"].in_flight == 1  # the caller has given up, the callee has not
        rpc.rpc_sync("worker1", release, args=("errors",))


def test_calls_under_way_are_in_flight():
    with workers(2, metrics=True):
        futures = [rpc.rpc_async("worker1", wait_for, args=("flight",)) for _ in range(3)]
        assert rows_of(None, "out")[NAME + "wait_for"].in_flight == 3
        rpc.rpc_sync("worker1", release, args=("flight",))
        torch.futures.wait_all(futures)
        row = rows_of(None, "out")[NAME + "wait_for"]
        assert (row.in_flight, row.calls) == (0, 3)


def test_metrics_are_off_unless_asked_for_and_can_be_turned_on_and_off():
    with workers(2):
        rpc.rpc_sync("worker1", double, args=(1,))
        assert observe.functions() == []
        observe.enable_metrics()
        rpc.rpc_sync("worker1", double, args=(1,))
        observe.enable_metrics(False)
        rpc.rpc_sync("worker1", double, args=(1,))
        [row] = observe.functions()
        assert (row.function, row.calls) == (NAME + "double", 1)
        with pytest.raises(TypeError, match="enabled must be a bool, but is a int: 1"):
            observe.enable_metrics(1)


def test_without_a_group_there_is_nothing_to_count():
    for use in (observe.functions, observe.enable_metrics):
        with pytest.raises(rpc.ShutdownError):
            use()


def counts_of_a_call(_):
    rpc.rpc_sync("worker0", double, args=(1,))
    return [row.function for row in observe.functions() if row.side == "out"]


def test_the_environment_turns_metrics_on():
    assert run_ranks(counts_of_a_call, 1, env={"TORCHRPC_METRICS": "1"}) == [[NAME + "double"]]
    assert run_ranks(counts_of_a_call, 1, env={"TORCHRPC_METRICS": "0"}) == [[]]


def join_with(_, variable):
    with pytest.raises(RuntimeError, match="TORCHRPC_METRICS must be 0 or 1, but is 'yes'"):
        rpc.init_rpc("w", rank=0, world_size=1)


def test_another_value_is_refused():
    run_ranks(join_with, 1, None, init=False, env={"TORCHRPC_METRICS": "yes"})
    with pytest.raises(TypeError, match="metrics must be a bool"):
        rpc.TensorPipeRpcBackendOptions(metrics="yes")
    assert rpc.TensorPipeRpcBackendOptions(metrics=True).metrics is True
    assert rpc.TensorPipeRpcBackendOptions().metrics is None


def test_messages_of_backward_passes_have_the_name_of_their_kind():
    from torchrpc import autograd

    with workers(2, metrics=True):
        x = torch.ones(2, requires_grad=True)
        for _ in range(3):
            with autograd.context() as context:
                autograd.backward(context, [rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()])
        assert rows_of(None, "out")["BACKWARD_AUTOGRAD_REQ"].calls == 3
        assert rows_of("worker1", "in")["BACKWARD_AUTOGRAD_REQ"].calls == 3
