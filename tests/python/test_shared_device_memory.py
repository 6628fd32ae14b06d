"""Memory of simulated devices that workers of one machine share, and what happens when they cannot."""

import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from waiting import eventually, stop

import torchrpc.rpc as rpc

sys.path.insert(0, str(Path(__file__).parents[1] / "accelerator"))
import lending
import sim
from device_pair import (
    HERE,
    SAME,
    THERE,
    breaks_group,
    in_process,
    lent_bytes,
    loans,
    loans_of,
    metrics,
    options,
    others,
    path,
)
from lending import doubled, sum_of

LARGE = 1 << 18  # elements; 1 MiB
SHARED = "in shared memory of the device"


@in_process
def test_large_tensors_are_read_from_the_senders_memory():
    for device in (HERE, SAME):
        assert path("w1", device) == SHARED
        before, before_there = loans(), loans_of("w1")
        for value in range(5):
            result = rpc.rpc_sync("w1", doubled, (torch.full((LARGE,), float(value), device=device),))
            assert result.device == torch.device(device)
            assert result.cpu().eq(2.0 * value).all()
        assert loans() == before + 5
        assert loans_of("w1") >= before_there + 4  # its first may be before the answer to its question
    eventually(lambda: lent_bytes() == 0)
    eventually(lambda: rpc.rpc_sync("w1", lent_bytes) == 0)


@in_process
def test_small_tensors_pass_through_host_memory():
    path()
    before = loans()
    assert rpc.rpc_sync("w1", sum_of, (torch.ones(10, device=HERE),)) == 10
    assert loans() == before


@in_process
def test_tensors_may_be_changed_and_freed_when_rpc_async_has_returned():
    lending.the_caller_may_change_and_free_its_tensor_at_once(LARGE)


def views_share(tensors):
    first, second = tensors
    first.fill_(3)
    return second.sum().item(), first.stride(), second.device


@in_process
def test_views_keep_their_strides_and_share_their_memory():
    path()
    base = torch.zeros(512, 512, device=HERE)
    before = loans()
    total, strides, device = rpc.rpc_sync("w1", views_share, ([base.t(), base[:256]],))
    assert (total, strides, device) == (3.0 * 256 * 512, (1, 512), torch.device(THERE))
    assert loans() == before + 1
    assert base.sum().item() == 0


@in_process
def test_gradients_requirement_dtype_and_bits_arrive():
    path()
    tensor = torch.ones(LARGE, device=HERE, dtype=torch.complex64, requires_grad=True)
    assert rpc.rpc_sync("w1", describe, (tensor.conj(),)) == (torch.complex64, True, True)


def describe(tensor):
    return tensor.dtype, tensor.is_conj(), tensor.requires_grad


_kept = {}


def keep(tensor):
    _kept["tensor"] = tensor
    return tensor


def kept_sum():
    return _kept["tensor"].sum().item()


@in_process
def test_a_result_that_the_callee_keeps_is_its_own():
    for worker in ("w1", "w0"):
        path()
        result = rpc.rpc_sync(worker, keep, (torch.ones(LARGE, device=HERE),))
        result.fill_(5)
        assert rpc.rpc_sync(worker, kept_sum) == LARGE
        assert result.sum().item() == 5 * LARGE


@in_process
def test_calls_to_itself_pass_no_host_memory():
    argument = torch.ones(8, device=HERE)
    before = loans()
    result = rpc.rpc_sync("w0", change, (argument,))
    assert argument.cpu().tolist() == [1.0] * 8  # the function has had a copy
    assert result.device == torch.device(HERE)
    assert result.cpu().tolist() == [3.0] * 8
    assert loans() == before + 2
    assert lent_bytes() == 0


def copies():
    return int(metrics()["device.copied_tensors"])


@in_process
def test_a_result_that_nobody_keeps_is_not_copied():
    tensor = torch.ones(LARGE, device=SAME)
    assert path("w1", SAME) == SHARED
    rpc.rpc_sync("w1", doubled, (tensor,))  # w1 learns that w0 can read its memory
    eventually(lambda: SHARED in rpc.rpc_sync("w1", metrics).get(f"device.path.w0 {SAME}", ""))
    for worker in ("w1", "w0"):
        before, before_there = copies(), rpc.rpc_sync(worker, copies)
        for _ in range(3):
            rpc.rpc_sync(worker, doubled, (tensor,))
        of_arguments = 3
        assert rpc.rpc_sync(worker, copies) - before_there == (of_arguments if worker == "w0" else 0)
        assert copies() - before == of_arguments
        rpc.rpc_sync(worker, keep, (tensor,))
        assert rpc.rpc_sync(worker, copies) - before_there == (of_arguments + 2 if worker == "w0" else 1)


@in_process
@options(share_device_tensors=True)
def test_memory_is_returned_after_the_work_that_uses_it():
    path(device=SAME)
    rpc.rpc_sync("w1", keep, (torch.full((LARGE,), 3.0, device=SAME),))
    rpc.rpc_sync("w1", use_late_and_forget)
    eventually(lambda: lent_bytes() == 0)
    assert rpc.rpc_sync("w1", late_sum) == 3 * LARGE


def use_late_and_forget():
    """Read the tensor on a stream that is busy for long after the function has returned."""
    stream = sim.Stream(SAME)
    stream.wait_stream(sim.current_stream(SAME))
    with sim.stream(stream):
        sim._sleep(4e8)
        _kept["sum"] = _kept.pop("tensor").sum()
    _kept["stream"] = stream


def late_sum():
    _kept["stream"].synchronize()
    return _kept["sum"].item()


def change(tensor):
    assert tensor.device == torch.device(THERE)
    return tensor.add_(2)


def fail(tensor):
    raise ValueError("on purpose")


@in_process
def test_nothing_stays_lent_when_calls_fail():
    path()
    for worker in ("w0", "w1"):
        with pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_sync(worker, fail, (torch.ones(LARGE, device=HERE),))
    rpc.rpc_sync("w1", sim.fail_next_allocations, (1, 1))
    with pytest.raises(RuntimeError, match=r"w1 could not put the tensors of a message from w0 on sim:1.*memory"):
        rpc.rpc_sync("w1", sum_of, (torch.ones(LARGE, device=HERE),))
    with pytest.raises(RuntimeError, match=r"does not use that device|mapping is not available"):
        rpc.rpc_sync("w1", sum_of, (torch.ones(LARGE, device="sim:3"),))
    eventually(lambda: lent_bytes() == 0)
    assert rpc.rpc_sync("w1", sum_of, (torch.ones(LARGE, device=HERE),)) == LARGE


def wait_for(path):
    eventually(lambda: os.path.exists(path))


@in_process
@options(quotas={"w0": rpc.Quota(calls=3)})
def test_the_memory_of_a_call_that_is_refused_is_taken_back():
    assert path() == SHARED
    with tempfile.TemporaryDirectory() as folder:
        slow = [rpc.rpc_async("w1", wait_for, (f"{folder}/go",)) for _ in range(3)]
        with pytest.raises(rpc.QuotaExceededError):
            rpc.rpc_sync("w1", sum_of, (torch.ones(LARGE, device=HERE),))
        Path(folder, "go").touch()
        torch.futures.wait_all(slow)
    eventually(lambda: lent_bytes() == 0)


@in_process
def test_without_memory_for_a_copy_tensors_pass_through_host_memory():
    lending.without_memory_for_a_copy_a_tensor_travels_in_the_message(LARGE)


@in_process
def test_a_call_that_may_be_repeated_lends_nothing():
    lending.a_call_that_may_be_repeated_lends_nothing(LARGE)


@in_process
@breaks_group
def test_a_killed_receiver_leaves_nothing_lent():
    lending.a_killed_receiver_leaves_nothing_lent(LARGE)


@in_process
def test_the_memory_of_a_call_that_timed_out_is_taken_back():
    path()
    pid = rpc.rpc_sync("w1", os.getpid)
    stop(pid)
    call = rpc.rpc_async("w1", keep, (torch.ones(LARGE, device=HERE),), timeout=0.5)
    with pytest.raises(RuntimeError, match="more than set timeout"):
        call.wait()
    assert lent_bytes() == 4 * LARGE  # the receiver may be reading it
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: lent_bytes() == 0)
    assert rpc.rpc_sync("w1", sum_of, (torch.ones(LARGE, device=HERE),)) == LARGE


@in_process
@others(SIM_SHARING="refused")
def test_where_the_driver_refuses_tensors_pass_through_host_memory():
    assert path() == "through host memory: cannot map shared memory of sim:0: this process may not map it"
    before = loans()
    assert rpc.rpc_sync("w1", sum_of, (torch.ones(LARGE, device=HERE),)) == LARGE
    assert loans() == before


@in_process
@others(SIM_MACHINE="another")
def test_another_machine_has_other_devices():
    assert path() == "through host memory: none of the 4 devices here is the one with the id sim  0"
    assert rpc.rpc_sync("w1", doubled, (torch.ones(LARGE, device=HERE),)).sum().item() == 2 * LARGE


@in_process
@others(TORCHRPC_SHARE_DEVICE_MEMORY="0")
def test_a_worker_can_refuse_to_share_memory():
    assert path() == "through host memory: it does not share memory of devices"
    assert rpc.rpc_sync("w1", doubled, (torch.ones(LARGE, device=HERE),)).sum().item() == 2 * LARGE
    assert loans_of("w1") == 0
    assert rpc.rpc_sync("w1", path, ("w0", THERE)) == "through host memory: w1 does not share memory of devices"


# --- without a copy ---


def forget():
    _kept.clear()


def add_one_to_kept():
    _kept["tensor"].add_(1)


@in_process
@options(share_device_tensors=True)
def test_a_shared_tensor_is_used_where_it_is():
    path(device=SAME)
    tensor = torch.zeros(LARGE, device=SAME)
    copies_before = rpc.rpc_sync("w1", copies)
    result = rpc.rpc_sync("w1", keep, (tensor,))
    assert lent_bytes() == 4 * LARGE
    rpc.rpc_sync("w1", add_one_to_kept)
    assert tensor.sum().item() == LARGE
    assert result.sum().item() == 0  # w1 cannot share the memory of w0: the result is a copy
    assert rpc.rpc_sync("w1", copies) == copies_before + 1  # w1 made it on the device, not in host memory
    rpc.rpc_sync("w1", forget)
    del result
    eventually(lambda: lent_bytes() == 0)
    eventually(lambda: rpc.rpc_sync("w1", lent_bytes) == 0)


@in_process
@options(share_device_tensors=True)
def test_a_shared_tensor_lives_while_the_receiver_uses_it():
    path(device=SAME)
    rpc.rpc_sync("w1", keep, (torch.full((LARGE,), 3.0, device=SAME),))
    for value in range(20):  # would reuse memory that is free
        rpc.rpc_sync("w1", sum_of, (torch.full((LARGE,), float(value), device=SAME),))
    assert rpc.rpc_sync("w1", kept_sum) == 3 * LARGE
    rpc.rpc_sync("w1", forget)
    eventually(lambda: lent_bytes() == 0)


@in_process
@breaks_group
@options(share_device_tensors=True)
def test_a_killed_user_of_shared_tensors_returns_them():
    path(device=SAME)
    rpc.rpc_sync("w1", keep, (torch.ones(LARGE, device=SAME),))
    assert lent_bytes() == 4 * LARGE
    multiprocessing.active_children()[0].kill()
    eventually(lambda: lent_bytes() == 0)


@in_process
@options(share_device_tensors=True)
def test_a_function_that_changes_a_shared_argument_changes_the_callers():
    for worker in ("w1", "w0"):
        path(device=SAME)
        tensor = torch.ones(LARGE, device=SAME)
        rpc.rpc_sync(worker, torch.Tensor.add_, (tensor, 2))
        assert tensor.sum().item() == 3 * LARGE


@in_process
@options(share_device_tensors=True)
def test_tensors_for_another_device_are_copied():
    assert path("w1", THERE) == SHARED
    tensor = torch.ones(LARGE, device=THERE)
    assert rpc.rpc_sync("w1", keep, (tensor,)).device == torch.device(THERE)
    eventually(lambda: lent_bytes() == 0)
    tensor.fill_(2)
    assert rpc.rpc_sync("w1", kept_sum) == LARGE


@in_process
@options(
    share_device_tensors=True,
    allowed_functions=[
        "aten::add",
        "test_shared_device_memory.keep",
        "test_shared_device_memory.kept_sum",
        "device_pair.take_conflicts",
    ],
)
def test_a_worker_with_an_allow_list_copies_what_others_share():
    path(device=SAME)
    tensor = torch.ones(LARGE, device=SAME)
    rpc.rpc_sync("w1", keep, (tensor,))
    eventually(lambda: lent_bytes() == 0)
    tensor.fill_(2)
    assert rpc.rpc_sync("w1", kept_sum) == LARGE
