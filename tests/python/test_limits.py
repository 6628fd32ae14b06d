"""A process that the system gives no more threads or memory loses single calls, never a worker."""

import os
import resource
import time

import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc.testing import run_ranks, workers


def limit_memory(more_bytes):
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, resource.RLIM_INFINITY))


def numel(tensor):
    return tensor.numel()


def zeros(count):
    return torch.zeros(count)


@pytest.mark.parametrize("transport", ["native", "tcp"])
def test_a_tensor_too_large_for_the_callee_fails_its_call_alone(transport):
    with workers(2, transport=transport):
        assert rpc.rpc_sync("worker1", numel, args=(torch.ones(10),)) == 10
        rref = rpc.remote("worker1", zeros, args=(3,))
        rpc.rpc_sync("worker1", limit_memory, args=(256 << 20,))
        with pytest.raises(RuntimeError, match="no memory"):
            rpc.rpc_sync("worker1", numel, args=(torch.ones(200 << 20),))
        assert rpc.rpc_sync("worker1", numel, args=(torch.ones(1 << 20),)) == 1 << 20
        assert rref.to_here().tolist() == [0, 0, 0]


@pytest.mark.parametrize("transport", ["native", "tcp"])
def test_a_result_too_large_for_the_caller_fails_its_call_alone(transport):
    with workers(2, transport=transport):
        assert rpc.rpc_sync("worker1", zeros, args=(10,)).numel() == 10
        unlimited = resource.getrlimit(resource.RLIMIT_AS)
        limit_memory(256 << 20)
        try:
            with pytest.raises(RuntimeError, match="no memory"):
                rpc.rpc_sync("worker1", zeros, args=(200 << 20,))
            assert rpc.rpc_sync("worker1", zeros, args=(1 << 20,)).numel() == 1 << 20
        finally:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)


def transports_of_both(rank, limited):
    if rank == limited:
        limit_memory(150 << 20)  # a pair of workers maps 272 MiB
    other = f"worker{1 - rank}"
    results = [rpc.rpc_sync(other, numel, args=(torch.ones(count),), timeout=20) for count in (10, 1 << 20)]
    rref = rpc.remote(other, zeros, args=(3,))
    return [*results, rref.to_here().numel()]


@pytest.mark.parametrize("limited", [0, 1])
def test_workers_without_address_space_for_shared_memory_use_the_socket(limited):
    assert run_ranks(transports_of_both, 2, limited) == [[10, 1 << 20, 3]] * 2


def permit_no_more_threads():
    """RLIMIT_NPROC counts all threads of a user; it does not bind root."""
    user = 40_000 + os.getpid() % 10_000
    os.setresuid(user, user, 0)
    resource.setrlimit(resource.RLIMIT_NPROC, (len(os.listdir("/proc/self/task")),) * 2)


def sleep(seconds):
    time.sleep(seconds)  # the function under test is slow
    return seconds


def few_threads(rank, limited):
    if rank == limited:
        permit_no_more_threads()
    if rank == 0:
        futures = [rpc.rpc_async("worker1", sleep, args=(0.05,), timeout=20) for _ in range(20)]
        assert [future.wait() for future in futures] == [0.05] * 20
        with pytest.raises(RuntimeError, match="set timeout"):
            rpc.rpc_sync("worker1", sleep, args=(5,), timeout=0.5)
        rpc.rpc_sync("worker1", os.setresuid, args=(0, 0, 0), timeout=20)
    os.setresuid(0, 0, 0)  # the store is a file of root's
    return True


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs a user of its own, whose threads it can count")


@needs_root
@pytest.mark.parametrize("limited", [0, 1])
def test_calls_end_where_the_system_permits_no_more_threads(limited):
    # Over TCP: Unix sockets are refused to a process of another user.
    assert run_ranks(few_threads, 2, limited, env={"TORCHRPC_TRANSPORT": "tcp"}) == [True, True]


def no_thread_at_all(rank):
    # First: the other user may not read the files of modules that are not loaded yet.
    options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:" + os.environ["MASTER_PORT"])
    permit_no_more_threads()
    store = torch.distributed.HashStore()
    try:
        rpc.TensorPipeAgent(store, "worker0", 0, 1, options, {}, [], init_timeout=5.0)
    except RuntimeError as error:
        return str(error)


@needs_root
def test_a_start_without_threads_is_an_error_that_names_the_limit():
    assert "ulimit -u" in run_ranks(no_thread_at_all, 1, init=False)[0]
