"""The simulated accelerator (tests/accelerator): a missing synchronization must give a wrong result."""

import copy
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "accelerator"))
import isolated
import sim
from isolated import on_accelerator

FOLDER = Path(isolated.__file__).parent


def poisoned(tensor):
    return bool(tensor.isnan().all())


@on_accelerator
def test_torch_knows_the_devices():
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == sim.device_count() == 4
    assert torch.sim is sim
    with sim.device(2):
        assert torch.ones(1, device="sim").device == torch.device("sim:2")
        assert torch.accelerator.current_device_index() == 2
    assert sim.current_device() == 0
    assert torch.ones(1).sim(3).device.index == 3
    torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="sim:4")


@on_accelerator
def test_streams_are_of_a_device_and_a_thread():
    stream = torch.Stream(device="sim:1")
    assert stream != sim.Stream("sim:1") != sim.default_stream(1)
    with stream:
        assert torch.accelerator.current_stream() == stream
        assert sim.current_device() == 1
        seen = []
        thread = threading.Thread(target=lambda: seen.append((sim.current_stream(1), sim.current_device())))
        thread.start()
        thread.join()
        assert seen == [(sim.default_stream(1), 0)]
    assert sim.current_stream(1) == sim.default_stream(1)


@on_accelerator
def test_the_host_runs_ahead_of_a_stream():
    tensor = torch.zeros(3, device="sim")
    with sim.hold():
        result = tensor + 1
        assert not sim.current_stream().query()
    assert result.tolist() == [1, 1, 1]
    assert sim.current_stream().query()


@on_accelerator
def test_a_stream_that_does_not_wait_for_another_gets_a_wrong_result():
    data = torch.ones(3, device="sim")
    sim.synchronize()
    stream = sim.Stream()
    with sim.hold():
        produced = data * 2
        with sim.stream(stream):
            consumed = produced + 1
    sim.synchronize()
    assert poisoned(consumed.cpu())
    assert produced.tolist() == [2, 2, 2]
    assert any("aten::add.out" in text or "aten::add" in text for text in sim.take_conflicts())


@on_accelerator
def test_a_stream_that_waits_for_an_event_gets_the_right_result():
    data = torch.ones(3, device="sim")
    stream, event = sim.Stream(), sim.Event()
    with sim.hold():
        produced = data * 2
        event.record()
        assert not event.query()
        event.wait(stream)
        with sim.stream(stream):
            consumed = produced + 1
    sim.current_stream().wait_stream(stream)
    assert consumed.tolist() == [3, 3, 3]
    assert event.query()
    assert sim.take_conflicts() == []


@on_accelerator
def test_an_order_through_a_third_stream_is_one():
    first, second, third = sim.Stream(), sim.Stream(1), sim.Stream()
    with sim.stream(first), sim.hold():
        data = torch.ones(3, device="sim:0")
        second.wait_stream(first)
        third.wait_stream(second)
        with sim.stream(third):
            result = data + 1
    third.synchronize()
    with sim.stream(third):
        assert result.tolist() == [2, 2, 2]
    assert sim.take_conflicts() == []


@on_accelerator
def test_an_event_covers_only_what_was_enqueued_before_it_was_recorded():
    stream, event = sim.Stream(), sim.Event()
    with sim.hold():
        data = torch.ones(3, device="sim")
        event.record()
        data.add_(1)
        event.wait(stream)
        with sim.stream(stream):
            late = data * 1
    sim.synchronize()
    assert poisoned(late.cpu())


@on_accelerator
def test_a_write_that_overtakes_a_read_spoils_the_read():
    data = torch.ones(3, device="sim")
    sim.synchronize()
    stream = sim.Stream()
    with sim.hold():
        read = data + 1
        with sim.stream(stream):
            data.fill_(5)
    sim.synchronize()
    assert poisoned(read.cpu())
    assert data.tolist() == [5, 5, 5]


@on_accelerator
def test_streams_may_write_different_parts_of_a_tensor():
    data = torch.zeros(8, device="sim")
    sim.synchronize()
    streams = [sim.Stream(), sim.Stream()]
    for part, stream in zip(data.chunk(2), streams, strict=True):
        with sim.stream(stream):
            part.fill_(3)
    sim.synchronize()
    assert data.tolist() == [3] * 8
    assert sim.take_conflicts() == []


@pytest.mark.skipif(sim.extension_path() is None, reason="the simulated accelerator is not built")
def test_the_host_cannot_access_device_memory():
    program = (
        "import ctypes, sim, torch; sim.load(); x = torch.ones(9, device='sim'); assert x.tolist() == [1] * 9;"
        "print('reads', flush=True); ctypes.string_at(x.data_ptr(), 4); print('unreachable')"
    )
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.stdout == "reads\n", result.stderr
    assert result.returncode == -signal.SIGSEGV


@on_accelerator
def test_new_memory_is_poison():
    assert poisoned(torch.empty(100, device="sim").cpu())
    torch.ones(100, device="sim")
    assert poisoned(torch.empty(100, device="sim").cpu())
    assert torch.empty(3, dtype=torch.int64, device="sim").tolist() == [-1] * 3


@on_accelerator
@pytest.mark.parametrize("records", [False, True])
def test_memory_that_another_stream_uses_needs_record_stream(records):
    stream = sim.Stream()
    data = torch.ones(1000, device="sim")
    stream.wait_stream(sim.current_stream())
    with sim.stream(stream), sim.hold():
        result = data + 1
        if records:
            data.record_stream(stream)
        del data
        sim.default_stream().synchronize()
        with sim.stream(sim.default_stream()):
            other = torch.full((1000,), 7.0, device="sim")
        sim.default_stream().synchronize()
    stream.synchronize()
    assert other.tolist() == [7] * 1000
    with sim.stream(stream):
        if records:
            assert result.tolist() == [2] * 1000
            assert sim.take_conflicts() == []
        else:
            assert poisoned(result.cpu())
            assert "without record_stream" in sim.take_conflicts()[0]


@on_accelerator
def test_copies_from_the_host_are_asynchronous_if_asked():
    for make in (lambda: torch.ones(3), lambda: torch.ones(3).pin_memory()):
        host = make()
        with sim.hold():
            copied = host.to("sim", non_blocking=True)
            host.fill_(2)
        assert copied.tolist() == [2, 2, 2]
        blocking = host.to("sim")
        host.fill_(3)
        assert blocking.tolist() == [2, 2, 2]


@on_accelerator
def test_host_memory_that_dies_before_the_copy_is_a_wrong_result_unless_it_is_pinned():
    with sim.hold():
        wrong = torch.ones(3).to("sim", non_blocking=True)
        right = torch.ones(3).pin_memory().to("sim", non_blocking=True)
        other = torch.full((3,), 5.0).pin_memory()
    assert poisoned(wrong.cpu())
    assert right.tolist() == [1, 1, 1]
    assert other.tolist() == [5, 5, 5]
    assert "host memory" in sim.take_conflicts()[0]


@on_accelerator
def test_copies_to_the_host_are_asynchronous_if_asked():
    data = torch.ones(3, device="sim")
    with sim.hold():
        copied = data.to("cpu", non_blocking=True)
        assert poisoned(copied)
    sim.synchronize()
    assert copied.tolist() == [1, 1, 1]
    assert data.cpu().tolist() == [1, 1, 1]


@on_accelerator
@pytest.mark.parametrize("waits", [False, True])
def test_streams_that_share_a_buffer_of_the_host_wait_for_each_other(waits):
    buffer = torch.zeros(3, pin_memory=True)
    source, stream = torch.ones(3, device="sim:0"), sim.Stream(1)
    with sim.hold():
        buffer.copy_(source, non_blocking=True)
        if waits:
            stream.wait_stream(sim.current_stream(0))
        with sim.stream(stream):
            copied = buffer.to("sim:1", non_blocking=True)
    sim.synchronize(0)
    stream.synchronize()
    with sim.stream(stream):
        assert copied.tolist() == [1, 1, 1] if waits else poisoned(copied.cpu())
    with sim.hold():
        moved = buffer.to("sim:0", non_blocking=True)
        buffer.copy_(source * 2, non_blocking=True)  # one stream may use a buffer again and again
        again = buffer.to("sim:0", non_blocking=True)
    assert moved.tolist() == [1, 1, 1]
    assert again.tolist() == [2, 2, 2]


@on_accelerator
def test_copies_between_devices_wait_for_both_streams():
    source, target = torch.ones(3, device="sim:0"), torch.zeros(3, device="sim:1")
    with sim.hold(sim.current_stream(1)):
        read = target + 5
        with sim.hold(sim.current_stream(0)):
            source.add_(1)
            target.copy_(source)
        result = target + 1
    assert read.tolist() == [5, 5, 5]
    assert result.tolist() == [3, 3, 3]
    assert source.to("sim:3", torch.float64).tolist() == [2, 2, 2]
    assert sim.take_conflicts() == []


@on_accelerator
def test_devices_are_independent():
    with sim.hold(sim.current_stream(0)):
        waiting = torch.ones(3, device="sim:0") + 1
        assert (torch.ones(3, device="sim:1") + 1).tolist() == [2, 2, 2]
        sim.synchronize(1)
        assert not sim.current_stream(0).query()
    assert waiting.tolist() == [2, 2, 2]


@on_accelerator
def test_arguments_of_two_devices_are_refused():
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*sim:0 and sim:1"):
        torch.ones(3, device="sim:0") + torch.ones(3, device="sim:1")
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*sim:0 and cpu"):
        torch.ones(3, device="sim:0") + torch.ones(3)
    assert (torch.ones(3, device="sim:0") + torch.tensor(2.0)).tolist() == [3, 3, 3]
    with pytest.raises(RuntimeError, match="Event device 0 does not match"):
        event = torch.Event("sim")
        event.record(sim.current_stream(0))
        event.record(sim.current_stream(1))


@on_accelerator
def test_out_of_memory_fails_one_allocation():
    used = sim.memory_allocated(3)
    sim.set_memory_limit(3, used + 2048)
    try:
        kept = torch.ones(256, device="sim:3")
        assert sim.memory_allocated(3) == torch.accelerator.memory_allocated(3) == used + 1024
        with pytest.raises(torch.OutOfMemoryError, match="sim:3 is out of memory"):
            torch.ones(512, device="sim:3")
        torch.ones(512, device="sim:2")
        del kept
        assert torch.ones(256, device="sim:3").sum().item() == 256
    finally:
        sim.set_memory_limit(3, 1 << 34)
    sim.fail_next_allocations(1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(1, device="sim:1")
    assert torch.ones(1, device="sim:1").item() == 1


@on_accelerator
def test_a_failed_kernel_is_reported_by_the_next_synchronization():
    data = torch.ones(3, device="sim:1")
    sim.synchronize(1)
    sim.fail_next_tasks("sim:1")
    result = data + 1
    with pytest.raises(RuntimeError, match="a kernel on sim:1 failed"):
        sim.synchronize(1)
    assert poisoned(result.cpu())
    rows = torch.ones(3, 2, device="sim:1")
    picked = rows.index_select(0, torch.tensor([7], device="sim:1"))
    with pytest.raises((RuntimeError, IndexError), match="out of range"):
        picked.cpu()
    assert (data + 1).tolist() == [2, 2, 2]


@on_accelerator
def test_operators_give_what_they_give_on_the_cpu():
    torch.manual_seed(0)
    a, b, n = torch.randn(5, 4), torch.randn(4, 5), torch.randint(0, 5, (7,))
    cases = [
        lambda a, b, n: a @ b,
        lambda a, b, n: torch.addmm(b @ a, b, a, beta=0.5),
        lambda a, b, n: (a.t() + b).softmax(1).log(),
        lambda a, b, n: torch.cat([a, b.t()])[n],
        lambda a, b, n: a[a > 0],
        lambda a, b, n: (a > 0).nonzero(),
        lambda a, b, n: n.unique(return_counts=True),
        lambda a, b, n: a.sort(1),
        lambda a, b, n: torch.nn.functional.layer_norm(a, (4,)),
        lambda a, b, n: torch.nn.functional.embedding(n, a),
        lambda a, b, n: torch.nn.functional.conv1d(a[None], b[:, :, None].expand(4, 5, 2).contiguous()),
        lambda a, b, n: a.clone().index_add_(0, n[:5], a),
        lambda a, b, n: a.clone().unsqueeze_(0).transpose_(1, 2),
        lambda a, b, n: a.unfold(0, 2, 1)[1:],
        lambda a, b, n: (torch.view_as_real(torch.complex(a, a)), torch.complex(a, a).conj() @ torch.complex(b, b)),
        lambda a, b, n: torch.complex(a, b.t()).conj().cpu(),
        lambda a, b, n: torch.complex(a, b.t()).conj().imag[1, 2].item(),
        lambda a, b, n: torch.linalg.svdvals(a),
        lambda a, b, n: a.std(),
        lambda a, b, n: torch.einsum("ij,jk->ik", a, b).to(torch.bfloat16),
        lambda a, b, n: torch.where(a > 0, a, 0.0).cumsum(0),
        lambda a, b, n: torch.equal(a, a.clone()),
        lambda a, b, n: a.clone().resize_(2, 2),
        lambda a, b, n: torch.empty(0, device=a.device).set_(a.untyped_storage(), 2, (2, 3)),
        lambda a, b, n: torch._foreach_mul([a, b], 2.0),
        lambda a, b, n: torch.add(a, a, out=torch.empty(0, device=a.device)),
        lambda a, b, n: a.max(1),
        lambda a, b, n: torch.triu(a).flip(0).repeat(2, 2),
    ]
    for case in cases:
        expected = case(a, b, n)
        got = case(a.sim(), b.sim(), n.sim())
        torch.testing.assert_close(torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, got), expected)
    assert sim.take_conflicts() == []


@on_accelerator
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("foreach", [False, None])
def test_training_gives_what_it_gives_on_the_cpu(name, foreach):
    losses = {}
    for device in ("cpu", "sim:2"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05, foreach=foreach)
        inputs = torch.linspace(-1, 1, 12).view(3, 4).to(device)
        losses[device] = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(inputs).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses[device].append(loss.item())
    assert losses["sim:2"] == pytest.approx(losses["cpu"])
    assert sim.take_conflicts() == []


MODULES = {
    "LSTM": (lambda nn: nn.LSTM(4, 5, batch_first=True), (2, 3, 4)),
    "GRU": (lambda nn: nn.GRU(4, 5, num_layers=2), (2, 3, 4)),
    "transformer": (lambda nn: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (2, 3, 8)),
    "convolution": (lambda nn: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2)), (2, 3, 4, 4)),
    "embedding bag": (lambda nn: nn.EmbeddingBag(10, 3), (4, 3)),
}


@on_accelerator
@pytest.mark.parametrize("name", MODULES)
def test_modules_give_what_they_give_on_the_cpu(name):
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make(torch.nn)
    inputs = torch.randint(0, 10, shape) if name == "embedding bag" else torch.randn(shape)
    twin = copy.deepcopy(module).sim(1)
    for each, device in ((module, "cpu"), (twin, "sim:1")):
        result = each(inputs.to(device))
        (result[0] if isinstance(result, tuple) else result).pow(2).sum().backward()
    for ours, theirs in zip(twin.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
    assert sim.take_conflicts() == []


@on_accelerator
def test_backward_passes_follow_devices_and_streams_of_the_forward():
    stream = sim.Stream(1)
    weight = torch.full((3,), 2.0, device="sim:0", requires_grad=True)
    bias = torch.ones(3, device="sim:1", requires_grad=True)
    stream.wait_stream(sim.current_stream(1))
    for _ in range(3):
        with sim.stream(stream):
            moved = (weight * 3).to("sim:1") + bias
        sim.current_stream(1).wait_stream(stream)
        moved.record_stream(sim.current_stream(1))
        loss = (moved * moved).sum()
        weight.grad = bias.grad = None
        loss.backward()
        assert bias.grad.tolist() == [14, 14, 14]
        assert weight.grad.tolist() == [42, 42, 42]
    assert sim.take_conflicts() == []


@on_accelerator
def test_random_numbers_depend_on_the_seed_of_the_device():
    def draw():
        return torch.rand(4, device="sim:1").tolist() + torch.nn.functional.dropout(torch.ones(4)).tolist()

    torch.manual_seed(5)
    first = draw()
    state = sim.get_rng_state(1)
    second = draw()
    torch.manual_seed(5)
    assert draw() == first
    sim.set_rng_state(state, 1)
    assert torch.rand(4, device="sim:1").tolist() == second[:4] != first[:4]
    generator = torch.Generator("sim:1").manual_seed(1)
    ours = torch.randn(3, device="sim:1", generator=generator)
    assert torch.equal(ours, torch.randn(3, device="sim:1", generator=generator.manual_seed(1)))


@on_accelerator
def test_tensors_can_be_saved_and_printed(tmp_path):
    tensor = torch.arange(4.0, device="sim:1")
    torch.save(tensor, tmp_path / "tensor")
    loaded = torch.load(tmp_path / "tensor")
    assert loaded.device == tensor.device
    assert loaded.tolist() == [0, 1, 2, 3]
    assert repr(tensor) == "tensor([0., 1., 2., 3.], device='sim:1')"


@on_accelerator
def test_sparse_tensors():
    sparse = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 4))
    moved = sparse.to("sim:1")
    assert moved.device == moved.coalesce().values().device == torch.device("sim:1")
    assert torch.equal(moved.to_dense().cpu(), sparse.to_dense())
    assert torch.equal((moved + moved).cpu().to_dense(), (sparse + sparse).to_dense())
    moved.add_(moved)
    assert torch.equal(moved.to_dense().cpu(), sparse.to_dense() * 2)
    dense = torch.ones(4, 2, device="sim:1")
    assert torch.equal((moved @ dense).cpu(), sparse.to_dense() * 2 @ torch.ones(4, 2))
    weight = torch.ones(5, 2, device="sim:1", requires_grad=True)
    indices = torch.tensor([1, 1], device="sim:1")
    torch.nn.functional.embedding(indices, weight, sparse=True).sum().backward()
    assert weight.grad.is_sparse
    assert weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [0, 0], [0, 0]]


@on_accelerator
def test_elapsed_time():
    start, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    start.record()
    sim._sleep(20_000_000)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 20


@on_accelerator
def test_many_threads_use_streams_of_their_own():
    failures = []

    def work(index):
        try:
            with sim.stream(sim.Stream(index % 4)):
                total = torch.zeros(50, device=f"sim:{index % 4}")
                for step in range(30):
                    total = total + step
                assert total.tolist() == [435] * 50
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sim.take_conflicts() == []


def _forked_child(connection):
    try:
        torch.ones(1, device="sim")
        connection.send("no error")
    except RuntimeError as error:
        connection.send(str(error))


def _spawned_child(connection):
    sim.load()
    connection.send((torch.ones(2, device="sim:3") + 1).tolist())


@on_accelerator
@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [("fork", _forked_child, "use the start method 'spawn'"), ("spawn", _spawned_child, [2, 2])],
)
def test_child_processes(method, target, expected):
    torch.ones(1, device="sim").item()
    context = mp.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60)
    answer = ours.recv()
    process.join(60)
    assert process.exitcode == 0
    assert answer == expected or expected in answer


@pytest.mark.skipif(sim.extension_path() is None, reason="the simulated accelerator is not built")
def test_a_process_ends_with_work_under_way():
    program = "import sim, torch; sim.load(); kept = torch.ones(9, device='sim'); [kept + i for i in range(99)]"
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", program], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(FOLDER)}
        )
