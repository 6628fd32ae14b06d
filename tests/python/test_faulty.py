"""The backend FAULTY_TENSORPIPE: injected failures and delays of messages."""

import os
import time

import pytest
import torch
from waiting import eventually

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.testing import run_ranks

RELIABLE = ["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE", "CLEANUP_AUTOGRAD_CONTEXT_REQ"]


def join(rank, fn, faults):
    import torchrpc.rpc._testing as testing

    options = testing.FaultyTensorPipeRpcBackendOptions(
        num_worker_threads=8,
        rpc_timeout=30,
        init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}",
        **{"messages_to_fail": [], "messages_to_delay": {}, **faults},
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)  # the backend is inferred
    result = fn() if rank == 0 else None
    rpc.shutdown()
    return result


def with_faults(fn, **faults):
    return run_ranks(join, 3, fn, faults, start_method="forkserver", init=False)[0]


def plus_one(value):
    return value + 1


def value_of(rref):
    return rref.to_here()


def owners_here():
    return int(rpc._get_debug_info()["num_owner_rrefs"])


def contexts_here():
    return int(rpc._get_debug_info()["num_autograd_contexts"])


def wait_for_none_of(count, worker):
    eventually(lambda: not rpc.rpc_sync(worker, count), seconds=20)


def fail_calls():
    results = []
    for _ in range(3):
        try:
            results.append(rpc.rpc_sync("worker1", torch.neg, (torch.ones(1),)).item())
        except RuntimeError as exc:
            results.append(str(exc))
    return results


def test_a_call_fails_as_often_as_ordered():
    first, second, third = with_faults(fail_calls, messages_to_fail=["SCRIPT_CALL"], num_fail_sends=2)
    assert "worker1" in first and "injected" in first and second == first
    assert third == -1


def fail_remotes():
    for to in ("worker0", "worker1"):
        for function in (plus_one, torch.neg):
            rref = rpc.remote(to, function, (torch.ones(1),))
            with pytest.raises(RuntimeError, match="RRef creation"):
                rref.to_here()
            with pytest.raises(RuntimeError, match="RRef creation"):
                rpc.rpc_async("worker1", value_of, (rref,))


def test_an_rref_whose_remote_call_failed_raises_an_error():
    with_faults(fail_remotes, messages_to_fail=["PYTHON_REMOTE_CALL", "SCRIPT_REMOTE_CALL"], num_fail_sends=1)


def share_and_drop():
    rref = rpc.remote("worker1", plus_one, (1,))
    assert rpc.rpc_sync("worker2", value_of, (rref,)) == 2
    del rref
    wait_for_none_of(owners_here, "worker1")
    with dist_autograd.context() as context:
        rpc.rpc_sync("worker1", torch.neg, (torch.ones(1, requires_grad=True),))
    wait_for_none_of(contexts_here, "worker1")
    return context is not None


def test_references_and_contexts_end_although_the_messages_that_end_them_fail():
    assert with_faults(share_and_drop, messages_to_fail=RELIABLE, num_fail_sends=3)


DONE = []


def done():
    return list(DONE)


def be_late():
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rpc.rpc_sync("worker1", DONE.append, (1,), timeout=0.05)
    start = time.monotonic()
    return rpc.rpc_sync("worker1", plus_one, (1,)), time.monotonic() - start


def test_a_late_call_times_out():
    value, seconds = with_faults(be_late, messages_to_delay={"PYTHON_CALL": 0.5})
    assert value == 2
    assert seconds >= 0.5


def test_messages_that_do_not_exist_are_refused():
    with pytest.raises(RuntimeError, match="there is no kind of message named PYTHON_KALL"):
        run_ranks(join, 1, fail_calls, {"messages_to_fail": ["PYTHON_KALL"]}, start_method="forkserver", init=False)
