"""Tests of tensors that w0 lends to w1, for both ways: w1 maps the memory, or reads it in chunks.

Each function with `size` is the body of a test of device_pair. `size` is a number of float elements, large enough for
the tensor to be lent.
"""

import multiprocessing
import os

import pytest
import sim
import torch
from device_pair import HERE, lent_bytes, loans, loans_of, metrics, path
from waiting import eventually, stop

import torchrpc.rpc as rpc


def sum_of(tensor):
    return tensor.sum(dtype=torch.float64).item()


def doubled(tensor):
    return tensor * 2


def the_caller_may_change_and_free_its_tensor_at_once(size):
    path()
    tensor = torch.ones(size, device=HERE)
    futures = []
    for _ in range(4):
        futures.append(rpc.rpc_async("w1", sum_of, (tensor,)))
        tensor.mul_(2)
    del tensor
    assert [future.wait() for future in futures] == [size * 2.0**i for i in range(4)]
    eventually(lambda: lent_bytes() == 0)


def without_memory_for_a_copy_a_tensor_travels_in_the_message(size):
    path()
    tensor = torch.ones(size, device=HERE)
    before = loans()
    sim.fail_next_allocations(0, 1)
    assert rpc.rpc_sync("w1", sum_of, (tensor,)) == size
    assert loans() == before
    assert metrics()["device.lending_failures"] == "1"


def a_call_that_may_be_repeated_lends_nothing(size):
    path()
    before = loans(), loans_of("w1")
    tensor = torch.arange(size, dtype=torch.float32)
    result = rpc.rpc_sync("w1", doubled, (tensor.to(HERE),), retries=rpc.RetryPolicy(retries=2))
    assert result.cpu().equal(2 * tensor)
    assert (loans(), loans_of("w1")) == before


def a_killed_receiver_leaves_nothing_lent(size):
    path()
    stop(rpc.rpc_sync("w1", os.getpid))
    calls = [rpc.rpc_async("w1", sum_of, (torch.ones(size, device=HERE),)) for _ in range(3)]
    eventually(lambda: lent_bytes() == 3 * 4 * size)
    multiprocessing.active_children()[0].kill()
    for call in calls:
        with pytest.raises(RuntimeError, match="w1"):
            call.wait()
    eventually(lambda: lent_bytes() == 0)
