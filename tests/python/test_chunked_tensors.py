"""Large tensors of simulated devices that pass through host memory: in chunks, which the receiver reads."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from test_transports import without_ucx
from waiting import eventually

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc import keygen

sys.path.insert(0, str(Path(__file__).parents[1] / "accelerator"))
import device_group
import isolated
import lending
import sim
from device_pair import (
    HERE,
    THERE,
    breaks_group,
    in_process,
    lent_bytes,
    loans,
    loans_of,
    maps,
    metrics,
    options,
    others,
    path,
)
from lending import doubled, sum_of

CHUNK = 1 << 20  # elements; 4 MiB
LARGE = 3 * CHUNK + 1  # three chunks and a part of one
through_host = others(TORCHRPC_SHARE_DEVICE_MEMORY="0")


def numbers(size=LARGE, device=HERE):
    return torch.arange(size, dtype=torch.float32, device=device)


def used_transport():
    return rpc.api._get_current_rpc_agent().get_debug_info()["agent.transport"]


@in_process
@through_host
def test_arguments_and_results_are_whole():
    assert used_transport().startswith(os.environ.get("EXPECTED_TRANSPORT", "native(shm"))
    assert path().startswith("through host memory")
    before, before_there = loans(), loans_of("w1")
    for _ in range(3):
        result = rpc.rpc_sync("w1", doubled, (numbers(),))
        assert result.device == torch.device(HERE)
        assert result.cpu().equal(2 * numbers(device="cpu"))
    assert loans() == before + 3
    assert loans_of("w1") == before_there + 3
    eventually(lambda: lent_bytes() == 0)
    eventually(lambda: rpc.rpc_sync("w1", lent_bytes) == 0)


@pytest.mark.parametrize(
    ("transport", "expected"), [("tcp", "native(tcp)"), ("tensorpipe", "tensorpipe("), ("ucx", "ucx(")]
)
def test_every_transport_carries_chunks(monkeypatch, transport, expected):
    if transport == "ucx" and (reason := without_ucx()):
        pytest.skip(reason)
    monkeypatch.setenv("TORCHRPC_TRANSPORT", transport)
    monkeypatch.setenv("EXPECTED_TRANSPORT", expected)
    test_arguments_and_results_are_whole()


@in_process
@through_host
def test_tensors_below_8_MiB_travel_in_the_message():
    path()
    before = loans()
    assert rpc.rpc_sync("w1", sum_of, (torch.ones(2 * CHUNK - 1, device=HERE),)) == 2 * CHUNK - 1
    assert loans() == before
    assert rpc.rpc_sync("w1", sum_of, (torch.ones(2 * CHUNK, device=HERE),)) == 2 * CHUNK
    assert loans() == before + 1


@in_process
@through_host
def test_the_caller_may_change_and_free_its_tensor_at_once():
    lending.the_caller_may_change_and_free_its_tensor_at_once(LARGE)


def fill_first(tensors):
    first, small, other = tensors
    first.fill_(3)
    return [sum_of(small), first.stride(), small.device, sum_of(other)]


@in_process
@through_host
def test_views_share_their_memory_however_small_they_are():
    path()
    base = torch.zeros(2048, 2048, device=HERE)
    before = loans()
    other = torch.ones(LARGE, dtype=torch.int8, device=HERE)  # small enough for the message
    found = rpc.rpc_sync("w1", fill_first, ([base.t(), base[5, :7], other],))
    assert found == [21.0, (1, 2048), torch.device(THERE), LARGE]
    assert loans() == before + 1
    assert sum_of(base) == 0


def describe(tensor):
    return tensor.dtype, tensor.is_conj(), tensor.requires_grad, tensor.stride(), tensor.detach().cpu()[5, 3].item()


@in_process
@through_host
def test_dtype_bits_strides_and_requires_grad_arrive():
    path()
    tensor = torch.full((1024, 2048), 1 + 2j, dtype=torch.complex64, device=HERE, requires_grad=True)
    found = rpc.rpc_sync("w1", describe, (tensor.t().conj(),))
    assert found == (torch.complex64, True, True, (1, 2048), 1 - 2j)


def column(rows, columns):
    """Return a thin view that nothing else refers to."""
    return numbers(rows * columns, THERE).view(rows, columns)[:, 3]


@in_process
@through_host
def test_a_thin_view_does_not_send_its_whole_memory():
    path()
    size = 1 << 21
    result = rpc.rpc_sync("w1", column, (size, 8))
    assert result.cpu().equal(torch.arange(3, 8 * size, 8, dtype=torch.float32))
    assert result.untyped_storage().nbytes() < 2 * 4 * size


def tail(size):
    return numbers(2 * size, THERE)[size + 3 :]


@in_process
@through_host
def test_a_part_of_a_storage_is_read_without_the_rest():
    path()
    result = rpc.rpc_sync("w1", tail, (LARGE,))
    assert result.cpu().equal(torch.arange(LARGE + 3, 2 * LARGE, dtype=torch.float32))
    assert result.untyped_storage().nbytes() < 4 * LARGE + 64


_kept = {}


def keep(tensor):
    _kept["tensor"] = tensor
    return tensor


def kept_sum():
    return sum_of(_kept["tensor"])


@in_process
@through_host
def test_a_result_that_the_callee_keeps_is_its_own():
    path()
    result = rpc.rpc_sync("w1", keep, (torch.ones(LARGE, device=HERE),))
    result.fill_(5)
    assert rpc.rpc_sync("w1", kept_sum) == LARGE


@in_process
@through_host
@options(share_device_tensors=True)
def test_shared_tensors_are_read_where_they_cannot_be_mapped():
    assert path().startswith("through host memory")
    tensor = torch.ones(LARGE, device=HERE)
    rpc.rpc_sync("w1", keep, (tensor,))
    eventually(lambda: lent_bytes() == 0)
    assert int(metrics()["device.copied_tensors"]) == 0
    tensor.fill_(2)
    assert rpc.rpc_sync("w1", kept_sum) == LARGE


def device_of(tensor):
    return tensor.device, sum_of(tensor)


@in_process
@maps({"w0": {worker: {"sim:3": "cpu"} for worker in ("w0", "w1")}, "w1": {}})
def test_a_tensor_for_the_cpu_is_read_into_host_memory():
    for worker in ("w1", "w0"):
        before = loans()
        found = rpc.rpc_sync(worker, device_of, (torch.ones(LARGE, device="sim:3"),))
        assert found == (torch.device("cpu"), LARGE)
        assert loans() == before + 1


def fail(tensor):
    raise ValueError("on purpose")


@in_process
@through_host
def test_nothing_stays_lent_when_calls_fail():
    path()
    with pytest.raises(ValueError, match="on purpose"):
        rpc.rpc_sync("w1", fail, (torch.ones(LARGE, device=HERE),))
    rpc.rpc_sync("w1", sim.fail_next_allocations, (1, 1))
    with pytest.raises(RuntimeError, match=r"w1 could not put the tensors of a message from w0 on sim:1.*memory"):
        rpc.rpc_sync("w1", sum_of, (torch.ones(LARGE, device=HERE),))
    sim.fail_next_allocations(0, 2)  # its own tensor, and the result
    with pytest.raises(RuntimeError, match=r"w0 could not put the tensors of a message from w1 on sim:0.*memory"):
        rpc.rpc_sync("w1", numbers, (LARGE, THERE))
    sim.fail_next_allocations(0, 0)
    eventually(lambda: lent_bytes() == 0)
    eventually(lambda: rpc.rpc_sync("w1", lent_bytes) == 0)
    assert rpc.rpc_sync("w1", sum_of, (torch.ones(LARGE, device=HERE),)) == LARGE


@in_process
@through_host
def test_without_memory_for_a_copy_a_tensor_travels_in_the_message():
    lending.without_memory_for_a_copy_a_tensor_travels_in_the_message(LARGE)


@in_process
@through_host
def test_a_call_that_may_be_repeated_lends_nothing():
    lending.a_call_that_may_be_repeated_lends_nothing(LARGE)


@in_process
@through_host
@options(quotas={"w0": rpc.Quota(calls=1)})
def test_reading_is_not_a_call_of_a_quota():
    for _ in range(20):
        result = rpc.rpc_sync("w1", doubled, (numbers(),))
        assert result[-1].item() == 2 * (LARGE - 1)


@in_process
@through_host
@options(limits=rpc.Limits(message_bytes=16 << 20))
def test_a_tensor_beyond_the_limit_of_messages_is_refused():
    path()
    with pytest.raises(RuntimeError, match="larger than the 16777216 allowed"):
        rpc.rpc_sync("w1", sum_of, (torch.ones(5 * CHUNK, device=HERE),))
    with pytest.raises(RuntimeError, match="larger than the 16777216 allowed"):
        rpc.rpc_sync("w1", numbers, (5 * CHUNK, THERE))
    eventually(lambda: lent_bytes() == 0)
    assert rpc.rpc_sync("w1", sum_of, (torch.ones(LARGE, device=HERE),)) == LARGE


@in_process
@through_host
@breaks_group
def test_a_killed_receiver_leaves_nothing_lent():
    lending.a_killed_receiver_leaves_nothing_lent(LARGE)


def make_large_result():
    _kept["result"] = numbers(64 * CHUNK, THERE)
    sim.synchronize(1)


def result_with_interrupted_reading(interrupt):
    """Return the large result, and call `interrupt` in a thread when its first chunks, but not all, have been read."""
    sim.set_start_delay(0.2)  # of the copy of each chunk, so that the thread comes in time

    def wait():
        executed = sim.executed_tasks(1)
        while sim.executed_tasks(1) < executed + 3:
            time.sleep(0.0001)  # looks often, so that it interrupts amid the chunks
        interrupt()

    threading.Thread(target=wait, daemon=True).start()
    return _kept.pop("result")  # nothing else refers to it, as to other results


def die_when_read():
    return result_with_interrupted_reading(lambda: os._exit(1))


@in_process
@through_host
@breaks_group
def test_a_lender_that_dies_while_it_is_read_is_reported():
    path()
    rpc.rpc_sync("w1", make_large_result)
    allocated = sim.memory_allocated(0)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="w1"):
        rpc.rpc_sync("w1", die_when_read)
    assert time.monotonic() - begun < 20
    eventually(lambda: sim.memory_allocated(0) <= allocated)


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


def stop_when_read():
    return result_with_interrupted_reading(lambda: os.kill(os.getpid(), signal.SIGSTOP))


@in_process
@through_host
def test_the_time_out_of_a_call_ends_its_reading():
    path()
    pid = rpc.rpc_sync("w1", os.getpid)
    rpc.rpc_sync("w1", make_large_result)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="more than set timeout"):
        rpc.rpc_sync("w1", stop_when_read, timeout=4)
    assert 3.5 < time.monotonic() - begun < 20
    eventually(lambda: is_stopped(pid))
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: rpc.rpc_sync("w1", lent_bytes) == 0)
    assert rpc.rpc_sync("w1", sum_of, (torch.ones(LARGE, device=HERE),)) == LARGE


def leave_meanwhile():
    """Make a large result; this worker begins to end before its caller can have it."""
    threading.Thread(target=lambda: rpc.shutdown(graceful=False)).start()
    caller = threading.Thread(target=call_until_refused)
    caller.start()
    caller.join()
    return numbers(16 * CHUNK, THERE)


def call_until_refused():
    with pytest.raises(rpc.ShutdownError):
        while True:
            rpc.rpc_sync("w0", os.getpid)


@in_process
@through_host
@breaks_group
def test_a_worker_does_not_end_before_its_last_result_is_read():
    path()
    result = rpc.rpc_sync("w1", leave_meanwhile)
    assert result.cpu().equal(numbers(16 * CHUNK, "cpu"))


def call_of_client():
    """Call w0 as a client, and return the result and how many loans there were."""
    before = loans(), loans_of("w0")
    result = rpc.rpc_sync("w0", doubled, (numbers(),))
    return result[-1].item(), loans() - before[0], loans_of("w0") - before[1]


def _call_with_identities(folder):
    sim.load()
    device_maps = {"w0": {"w1": {HERE: THERE}, "w2": {HERE: THERE}}, "w1": {}, "w2": {"w0": {HERE: THERE}}}
    with device_group.group(device_maps, identity=f"{folder}/{{name}}.identity"):
        before = loans()
        assert rpc.rpc_sync("w1", doubled, (numbers(),)).cpu().equal(2 * numbers(device="cpu"))
        assert loans() == before + 1
        assert rpc.rpc_sync("w2", doubled, (numbers(),))[-1].item() == 2 * (LARGE - 1)
        assert loans() == before + 1  # a client may not ask for memory
        assert rpc.rpc_sync("w2", call_of_client) == (2 * (LARGE - 1), 0, 0)
        eventually(lambda: lent_bytes() == 0)


def test_members_read_chunks_and_clients_do_not(tmp_path):
    with contextlib.redirect_stdout(None):
        keygen.main([str(tmp_path / "group.key"), "--member", "w0", "w1", "--client", "w2", "--folder", str(tmp_path)])
    isolated.run_in_new_process(_call_with_identities, str(tmp_path))


@in_process
@through_host
def test_rrefs_and_gradients_are_read_in_chunks():
    path()
    before = loans(), loans_of("w1")
    remote = rpc.remote("w1", doubled, (numbers(),))
    assert remote.to_here().cpu().equal(2 * numbers(device="cpu"))
    assert (loans(), loans_of("w1")) == (before[0] + 1, before[1] + 1)
    leaf = numbers().requires_grad_()
    with dist_autograd.context() as context:
        result = rpc.rpc_sync("w1", torch.mul, (leaf, 3))
        dist_autograd.backward(context, [result.sum()])
        gradient = dist_autograd.get_gradients(context)[leaf]
        assert gradient.device == leaf.device
        assert gradient.cpu().eq(3).all()
    assert (loans(), loans_of("w1")) == (before[0] + 3, before[1] + 3)
    eventually(lambda: lent_bytes() == 0)


def sum_slowly(tensor):
    time.sleep(0.02)  # the function under test is slow
    return sum_of(tensor)


@in_process
@through_host
def test_waiting_calls_do_not_fill_the_device():
    path()
    tensor = torch.ones(LARGE, device=HERE)
    rpc.rpc_sync("w1", torch.accelerator.reset_peak_memory_stats, (1,))
    futures = [rpc.rpc_async("w1", sum_slowly, (tensor,)) for _ in range(60)]
    assert [future.wait() for future in futures] == [LARGE] * 60
    peak = rpc.rpc_sync("w1", torch.accelerator.max_memory_allocated, (1,))
    # At most 256 MiB, and what runs; all together would be 720 MiB. How many wait depends on the speed of the caller.
    assert 2 * tensor.nbytes < peak < 340 << 20
    eventually(lambda: lent_bytes() == 0)


@in_process
@through_host
def test_chunks_do_not_wait_for_the_work_of_functions():
    path()
    with contextlib.ExitStack() as held:
        for _ in range(32):  # all streams that functions get
            held.enter_context(sim.hold(sim.Stream(HERE)))
        assert rpc.rpc_sync("w1", sum_of, (torch.ones(LARGE, device=HERE),), timeout=20) == LARGE


@in_process
@through_host
def test_both_directions_at_once():
    path()
    results = []

    def echo(value):
        for _ in range(3):
            tensor = torch.full((LARGE,), float(value), device=HERE)
            results.append(rpc.rpc_sync("w1", doubled, (tensor,)).cpu().eq(2 * value).all().item())

    threads = [threading.Thread(target=echo, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 12
    eventually(lambda: lent_bytes() == 0)
