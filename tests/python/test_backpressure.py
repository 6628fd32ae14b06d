"""What waits on a worker is bounded by bytes: calls that have not started, results that are not read."""

import os
import signal

import pytest
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc.testing import RankError, run_ranks, workers

MIB = 1 << 20
LIMIT = 16 * MIB
THREADS = 2

served = 0
futures = []


def memory_bytes(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(key))


def reset_peak():
    """Return the memory in use; from now on peak_bytes() tells how much more there was."""
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    return memory_bytes("VmRSS")


def peak_bytes():
    return memory_bytes("VmHWM")


def counter(name):
    return int(rpc._get_debug_info()[f"agent.{name}"])


def counter_of(worker, name):
    return rpc.rpc_sync(worker, counter, args=(name,))


def served_here():
    return served


def result_when(path, as_tensor):
    global served
    eventually(lambda: os.path.exists(path))
    served += 1
    return torch.zeros(MIB, dtype=torch.uint8) if as_tensor else bytes(MIB)


def send_calls(count, function, args):
    """Make calls to worker1 and keep their futures here; then release a reference to a value there."""
    rref = rpc.remote("worker1", len, args=("a value",))
    rref.to_here()
    futures.extend(rpc.rpc_async("worker1", function, args=args) for _ in range(count))


def send_tensors(count, path):
    futures.extend(rpc.rpc_async("worker1", numel_when, args=(path, torch.zeros(MIB // 4))) for _ in range(count))


def numel_when(path, tensor):
    eventually(lambda: os.path.exists(path))
    return tensor.numel()


def collect():
    results = [len(future.wait()) for future in futures]
    futures.clear()
    return results


def collect_numbers():
    results = [future.wait() for future in futures]
    futures.clear()
    return results


# Tensors that large would go to shared memory within a host, which has a limit of its own.
@pytest.mark.parametrize(("transport", "as_tensor"), [("tcp", True), ("tcp", False), ("native", False)])
def test_results_for_a_stopped_caller_are_bounded(tmp_path, transport, as_tensor):
    calls, path = 300, tmp_path / "go"
    with workers(3, transport=transport, num_worker_threads=THREADS, max_queued_bytes=LIMIT):
        pid = rpc.rpc_sync("worker2", os.getpid)
        before = rpc.rpc_sync("worker1", reset_peak)
        rpc.rpc_sync("worker2", send_calls, args=(calls, result_when, (path, as_tensor)))
        # No thread is needed to release the reference: when the owner has answered that, it has received all calls.
        eventually(lambda: counter_of("worker2", "num_pending_calls") == calls)
        os.kill(pid, signal.SIGSTOP)
        try:
            path.touch()
            eventually(
                lambda: rpc.rpc_sync("worker1", served_here) + counter_of("worker1", "num_deferred_calls") == calls
            )
            assert counter_of("worker1", "num_deferred_calls") > calls / 2
            assert rpc.rpc_sync("worker1", peak_bytes) - before < 3 * LIMIT
        finally:
            os.kill(pid, signal.SIGCONT)
        assert rpc.rpc_sync("worker2", collect) == [MIB] * calls
        assert counter_of("worker1", "num_deferred_calls") == 0


@pytest.mark.parametrize("transport", ["tcp", "native"])
def test_arguments_of_several_callers_are_bounded(tmp_path, transport):
    callers, calls, path = [f"worker{rank}" for rank in range(2, 6)], 64, tmp_path / "go"
    with workers(6, transport=transport, num_worker_threads=THREADS, max_queued_bytes=LIMIT):
        before = rpc.rpc_sync("worker1", reset_peak)
        for caller in callers:
            rpc.rpc_sync(caller, send_tensors, args=(calls, path))
        # All but those that run and those that a caller may have waiting.
        total = len(callers) * calls
        assert sum(counter_of(caller, "num_held_calls") for caller in callers) > total / 2
        path.touch()
        for caller in callers:
            assert rpc.rpc_sync(caller, collect_numbers) == [MIB // 4] * calls
        assert rpc.rpc_sync("worker1", peak_bytes) - before < 3 * LIMIT


def bounce(depth, tensor):
    me = rpc.get_worker_info().id
    if depth > 0:
        rpc.rpc_sync(f"worker{1 - me}", bounce, args=(depth - 1, tensor))
    return tensor


def flood(rank, count):
    tensor = torch.zeros(MIB)
    calls = [rpc.rpc_async(f"worker{1 - rank}", bounce, args=(3, tensor)) for _ in range(count)]
    return sum(call.wait().numel() for call in calls)


@pytest.mark.parametrize("transport", ["tcp", "native"])
def test_workers_that_flood_each_other_with_nested_calls_finish(transport):
    """Arguments and results of 4 MiB each, and a limit of 1 MiB."""
    env = {"TORCHRPC_MAX_QUEUED_BYTES": str(MIB), "TORCHRPC_TRANSPORT": transport}
    assert run_ranks(flood, 2, 20, env=env) == [20 * MIB] * 2


def test_the_variable_is_checked():
    with pytest.raises(RankError, match="TORCHRPC_MAX_QUEUED_BYTES must be a positive number of bytes, but is 'much'"):
        run_ranks(flood, 2, 1, env={"TORCHRPC_MAX_QUEUED_BYTES": "much"})
