"""Backward passes that cannot complete (lost workers, unused results), and the release of contexts."""

import contextlib
import os
import signal
import time

import pytest
import torch
from waiting import eventually

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.testing import RankError, workers


def leaf():
    return torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)


def sum_there(x):
    return x.sum()


def passes_under_way():
    return int(dist_autograd._get_debug_info()["num_current_backward_passes"])


def contexts_here():
    return int(dist_autograd._get_debug_info()["num_autograd_contexts"])


def all_zero(count, names):
    return all(rpc.rpc_sync(name, count) == 0 for name in names)


# --- unused results ---


def set_timeout_everywhere(seconds):
    for worker in ("worker1", "worker0"):
        rpc.rpc_sync(worker, rpc._set_rpc_timeout, (seconds,), timeout=60)


def test_a_fast_pass_with_an_unused_result_times_out_with_advice():
    with workers(2), dist_autograd.context() as context_id:
        x = leaf()
        rpc.rpc_sync("worker1", torch.add, (x, 2))
        loss = rpc.rpc_sync("worker1", torch.mul, (x, 2)).sum()
        set_timeout_everywhere(3)
        start = time.monotonic()
        with pytest.raises(
            RuntimeError, match=r"set timeout: .* misses the gradients of 1 of the 2 messages"
        ) as raised:
            dist_autograd.backward(context_id, [loss], mode="fast")
        assert 3 <= time.monotonic() - start < 30
        assert 'use mode="smart", or detach' in str(raised.value)
        set_timeout_everywhere(60)
        eventually(lambda: all_zero(passes_under_way, ["worker0", "worker1"]))
        dist_autograd.backward(context_id, [loss], mode="smart")
        assert torch.equal(dist_autograd.get_gradients(context_id)[x], torch.full((3,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("driver", ["worker0", "worker1"])
def test_a_smart_pass_does_not_need_workers_whose_results_are_unused(driver):
    """A stopped worker answers no message."""
    with workers(3):
        pid = rpc.rpc_sync("worker2", os.getpid)
        try:
            gradient = rpc.rpc_sync(driver, use_one_of_two, (pid,), timeout=20)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert torch.equal(gradient, torch.full((3,), 2.0, dtype=torch.float64))
        eventually(lambda: all_zero(contexts_here, ["worker0", "worker1", "worker2"]))


def use_one_of_two(pid):
    x = leaf()
    with dist_autograd.context() as context_id:
        unused = rpc.rpc_sync("worker2", torch.mul, (x, 3))
        rpc.rpc_sync("worker1", sum_of_two, (x, unused))
        loss = rpc.rpc_sync("worker1", torch.mul, (x, 2)).sum()
        os.kill(pid, signal.SIGSTOP)
        dist_autograd.backward(context_id, [loss], mode="smart")
        return dist_autograd.get_gradients(context_id)[x]


def sum_of_two(x, y):
    return x + rpc.rpc_sync("worker2", torch.mul, (y, 2))


# --- lost workers ---


@contextlib.contextmanager
def workers_but_one(world_size, victim):
    """A group whose worker `victim` dies in the block."""
    with pytest.raises(RankError, match=f"rank {victim[-1]} died"), workers(world_size):
        yield
        rpc.shutdown(graceful=False)  # a graceful shutdown would wait for the dead worker


def dying(x):
    result = x * 1
    result.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return result


def call_dying(to, x):
    return rpc.rpc_sync(to, dying, (x * 2,)) * 2


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("victim", ["worker1", "worker2"])
def test_a_worker_that_dies_during_a_pass_is_named_soon(victim, mode):
    with workers_but_one(4, victim):
        with dist_autograd.context() as context_id:
            if victim == "worker1":
                loss = rpc.rpc_sync(victim, dying, (leaf(),)).sum()
            else:
                loss = rpc.rpc_sync("worker3", call_dying, (victim, rpc.rpc_sync("worker1", leaf) + leaf())).sum()
            start = time.monotonic()
            with pytest.raises(RuntimeError, match=victim):
                dist_autograd.backward(context_id, [loss], mode=mode)
            assert time.monotonic() - start < 20  # the time-outs of silent workers and of calls are longer
        alive = {"worker0", "worker1", "worker3"} - {victim}
        eventually(lambda: all_zero(passes_under_way, alive))
        eventually(lambda: all_zero(contexts_here, alive))


held = []


def hold_a_context():
    held.append(dist_autograd._new_context())
    for name in ("worker0", "worker2"):
        rpc.rpc_sync(name, sum_there, (leaf(),))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def test_contexts_end_with_their_owner():
    with workers_but_one(3, "worker1"):
        rpc.rpc_sync("worker1", hold_a_context)
        assert [rpc.rpc_sync(name, contexts_here) for name in ("worker0", "worker2")] == [1, 1]
        with pytest.raises(RuntimeError, match="worker1"):
            rpc.rpc_sync("worker1", die)
        eventually(lambda: all_zero(contexts_here, ["worker0", "worker2"]))
