"""Tensors of accelerators in calls: on the simulated accelerator, where a missing synchronization is a wrong result."""

import functools
import multiprocessing
import operator
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from waiting import eventually, remains

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc import cpp_function
from torchrpc.nn import RemoteModule
from torchrpc.optim import DistributedOptimizer
from torchrpc.testing import free_port, start_process

sys.path.insert(0, str(Path(__file__).parents[1] / "accelerator"))
import device_group
import isolated
import sim

HERE = "sim:0"
THERE = "sim:1"  # of w1, as device_group.MAPS say


def with_group(test):
    """Run a test as w0 of device_group's group, and check that no work overtook other work."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        device_group.join()
        test(*args, **kwargs)
        for worker in device_group.MAPS:
            assert (found := rpc.rpc_sync(worker, take_conflicts)) == [], (worker, found)

    return isolated.on_accelerator(run)


def in_process(function):
    """Run a function in a process of its own that has the devices, and may be a worker of another group."""
    isolated.run_in_new_process(_run, function.__name__)


def _run(name, *args):
    sim.load()
    globals()[name](*args)


def take_conflicts():
    for index in range(sim.device_count()):
        sim.synchronize(index)
    return sim.take_conflicts()


def full(value, device=HERE, size=4, **options):
    return torch.full((size,), float(value), device=device, **options)


def values(tensor):
    return tensor.cpu().tolist()


# --- where tensors go ---


def add(a, b, device=THERE):
    assert a.device == b.device == torch.device(device)
    return a + b


@with_group
def test_arguments_and_results_go_where_the_map_says():
    for start in (rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait(), lambda *args: rpc.remote(*args).to_here()):
        result = start("w1", add, (full(1), full(2)))
        assert result.device == torch.device(HERE)
        assert values(result) == [3] * 4
    assert values(rpc.rpc_sync("w1", torch.add, (full(1), full(2)))) == [3] * 4
    result = rpc.rpc_sync("w1", add, (full(1, "sim:1"), full(2, "sim:1"), "sim:0"))
    assert result.device == torch.device("sim:1")


def devices_of(*tensors):
    return [str(tensor.device) for tensor in tensors]


@with_group
def test_the_cpu_can_be_one_of_the_two():
    assert rpc.rpc_sync("w2", devices_of, (full(1), full(1, "cpu"))) == ["sim:2", "sim:3"]
    assert rpc.rpc_sync("w2", torch.add, (full(1, "cpu"), full(2, "cpu"))).device == torch.device("cpu")
    assert rpc.rpc_sync("w1", from_w1_to_cpu) == ["cpu", "sim:3"]


def from_w1_to_cpu():
    sent = rpc.rpc_sync("w2", devices_of, (full(1, "sim:3"),))
    return sent + devices_of(rpc.rpc_sync("w2", full, (1, "cpu")))


@with_group
def test_a_call_of_a_worker_to_itself_is_mapped():
    argument = full(1)
    result = rpc.rpc_sync("w0", torch.Tensor.add_, (argument, 1))
    assert result.device == torch.device(HERE)
    assert values(result) == [2] * 4
    assert values(argument) == [1] * 4


def describe(tensor):
    return (
        tensor.device.type,
        tensor.dtype,
        tensor.shape,
        tensor.stride() if tensor.layout == torch.strided else None,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.layout,
    )


def described(tensors):
    return [describe(tensor) for tensor in tensors], tensors


@with_group
def test_tensors_keep_their_form():
    tensors = [
        torch.tensor(5, device=HERE),
        torch.empty(0, 3, device=HERE),
        torch.arange(12, device=HERE).view(3, 4).t(),
        torch.arange(1_000_000.0, device=HERE)[::3],
        torch.arange(1_000_000.0, device=HERE)[7:11],
        torch.ones(3, device=HERE, requires_grad=True),
        torch.ones(3, device=HERE).expand(5, 3),
        torch.tensor([1 + 2j, 3j], device=HERE),
        torch.zeros(2, 3, device=HERE, dtype=torch.bool),
        torch.arange(3, device=HERE, dtype=torch.int8),
        torch.ones(1 << 20, device=HERE, dtype=torch.float64),
    ]
    forms, results = rpc.rpc_sync("w1", described, (tensors,))
    for tensor, form, result in zip(tensors, forms, results, strict=True):
        detached = [str(part) for part in describe(tensor)]
        if tensor.numel() * 2 < tensor.untyped_storage().nbytes() / tensor.itemsize and tensor.stride() == (3,):
            detached[3] = "(1,)"  # most of its memory is not sent
        assert [str(part) for part in form] == detached
        assert torch.equal(result.detach().cpu(), tensor.detach().cpu())


def change_first(tensors):
    tensors[0].fill_(7)
    return [tensor.cpu() for tensor in tensors], tensors


@with_group
def test_tensors_that_share_memory_share_it_there():
    base = torch.zeros(8, device=HERE)
    changed, returned = rpc.rpc_sync("w1", change_first, ([base[2:6], base, base[:4]],))
    assert changed[1].tolist() == [0, 0, 7, 7, 7, 7, 0, 0]
    assert changed[2].tolist() == [0, 0, 7, 7]
    assert values(base) == [0] * 8
    returned[0].zero_()
    assert values(returned[1]) == [0] * 8


class Holder:
    def __init__(self, tensor):
        self.tensor = tensor


def doubled(holder):
    return Holder(holder.tensor * 2)


@with_group
def test_tensors_in_objects_are_mapped():
    result = rpc.rpc_sync("w1", doubled, (Holder(full(3)),))
    assert values(result.tensor) == [6] * 4
    assert result.tensor.device == torch.device(HERE)


def same_name():
    with device_group.group({"w0": {}, "w1": {"w0": {"sim:3": "sim:2"}}}, device_maps="identity"):
        assert rpc.rpc_sync("w1", devices_of, (full(1, "sim:3"), full(1), full(1, "cpu"))) == ["sim:3", HERE, "cpu"]
        assert rpc.rpc_sync("w1", full, (2, "sim:1")).device == torch.device("sim:1")
        assert rpc.rpc_sync("w1", back_by_map) == ["sim:2"]


def test_the_same_name_maps_devices_without_a_map():
    in_process(same_name)


def from_cpu():
    with device_group.group({"w0": {"w1": {"cpu": "sim:1"}}, "w1": {}}):
        assert rpc.rpc_sync("w1", devices_of, (torch.ones(4),)) == ["sim:1"]
        result = rpc.rpc_sync("w1", torch.add, (torch.ones(4), 1))
        assert (result.device, values(result)) == (torch.device("cpu"), [2.0] * 4)


def to_cpu():
    with device_group.group({"w0": {"w1": {"sim:1": "cpu"}}, "w1": {}}):
        assert rpc.rpc_sync("w1", devices_of, (full(1, "sim:1"),)) == ["cpu"]
        result = rpc.rpc_sync("w1", torch.add, (full(1, "sim:1"), 1))
        assert (result.device, values(result)) == (torch.device("sim:1"), [2.0] * 4)


@pytest.mark.parametrize("one_way", [from_cpu, to_cpu])
def test_one_of_two_workers_needs_no_device(one_way):
    in_process(one_way)


def back_by_map():
    return rpc.rpc_sync("w0", devices_of, (full(1, "sim:3"),))


# --- a C++ worker with the devices: tests/cpp/accelerator/device_worker.cpp ---


def device_worker():
    built = Path(__file__).parents[2] / "build/release/tests/cpp/device_worker"
    return Path(os.environ.get("TORCHRPC_DEVICE_WORKER", built)).resolve()


def with_cpp_worker():
    port = free_port()
    worker = subprocess.Popen([device_worker(), "cpp", "1", "2", str(port)])
    try:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
        options.set_device_map("cpp", {"sim:0": "sim:3"})
        rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=options)
        python_calls_cpp()
        cpp_calls_python()
        assert rpc.rpc_sync("cpp", cpp_function("takeConflicts")) == take_conflicts() == []
        rpc.shutdown()
        assert worker.wait(30) == 0
    finally:
        worker.kill()


def python_calls_cpp():
    assert rpc.rpc_sync("cpp", cpp_function("deviceOf"), (full(1),)) == "sim:3"
    a, b = full(3, requires_grad=True), full(5)
    rref = rpc.remote("cpp", cpp_function("product"), (a, b))
    assert values(rpc.rpc_sync("cpp", cpp_function("doubled"), (rref,))) == [30] * 4
    assert rref.to_here().device == torch.device(HERE)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [rpc.rpc_sync("cpp", cpp_function("product"), (a, b)).sum()])
        gradient = dist_autograd.get_gradients(context)[a]
        assert gradient.device == torch.device(HERE) and values(gradient) == [5] * 4
    with pytest.raises(RuntimeError, match=r"destination cpp, and a tensor is on sim:2 of w0"):
        rpc.rpc_sync("cpp", cpp_function("deviceOf"), (full(1, "sim:2"),))


def cpp_calls_python():
    def call(name, function):
        return rpc.rpc_sync("cpp", cpp_function(name), (f"{__name__}.{function}",))

    assert call("callPython", "doubled_on_2") == ["sim:1", "24.000000"]
    assert call("gradientThroughPython", "doubled_on_2") == ["sim:1", "8.000000"]
    assert "destination w0, and a tensor is on sim:3 of cpp" in call("sendUnmapped", "doubled_on_2")


def doubled_on_2(tensor):
    assert tensor.device == torch.device("sim:2")
    return tensor * 2


def test_python_and_cpp_workers_map_devices_to_each_other():
    if not device_worker().exists():
        pytest.skip(f"{device_worker()} is not built: `make test` does it")
    in_process(with_cpp_worker)


def with_cpp_worker_that_is_misled():
    port = free_port()
    worker = subprocess.Popen([device_worker(), "cpp", "1", "2", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
        options.set_device_map("cpp", {"sim:0": "sim:4"})
        with pytest.raises(ValueError, match=r"Node w0 has target devices with invalid indices .* for cpp"):
            rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=options)
        _, output = worker.communicate(timeout=30)
        assert worker.returncode == 1, (worker.returncode, output)
        assert "invalid argument: Node w0 has target devices with invalid indices in its device map for cpp" in output
    finally:
        worker.kill()


def test_python_and_cpp_workers_refuse_the_same_maps():
    if not device_worker().exists():
        pytest.skip(f"{device_worker()} is not built: `make test` does it")
    in_process(with_cpp_worker_that_is_misled)


# --- groups that change ---


def grow(rank, url, has_begun, has_called):
    options = rpc.TensorPipeRpcBackendOptions(init_method=url)
    if rank == 0:
        rpc.init_rpc("w0", rank=0, rpc_backend_options=options)
        has_begun.set()
        assert has_called.wait(60)
    else:
        options.set_device_map("w0", {"sim:1": "sim:2"})
        assert has_begun.wait(60)
        rpc.init_rpc("w1", rank=1, rpc_backend_options=options)
        result = rpc.rpc_sync("w0", add, (full(1, "sim:1"), full(2, "sim:1"), "sim:2"))
        assert result.device == torch.device("sim:1") and values(result) == [3] * 4
        has_called.set()
    rpc.shutdown()


def test_a_worker_that_joins_later_brings_its_maps(tmp_path):
    isolated.skip_unless_built()
    context = multiprocessing.get_context("forkserver")
    arguments = f"file://{tmp_path}/store", context.Event(), context.Event()
    workers = [start_process(_run, "grow", rank, *arguments) for rank in range(2)]
    for worker in workers:
        worker.join(100)
        worker.kill()
    assert [worker.exitcode for worker in workers] == [0, 0]


# --- the order of work ---


@with_group
def test_a_call_waits_for_the_work_that_computes_its_arguments_but_its_caller_does_not():
    one = full(1)
    stream = torch.Stream(device=HERE)
    with stream:
        stream.wait_stream(sim.default_stream(0))
        with sim.hold(stream):
            tensor = one + 1
            future = rpc.rpc_async("w1", add, (tensor, tensor))
            assert not stream.query()  # the caller has not waited for it
            remains(lambda: not future.done(), 0.05)
            del tensor
    assert values(future.wait()) == [4] * 4


@with_group
def test_arguments_may_be_changed_and_freed_after_the_call():
    futures = []
    for i in range(10):
        tensor = full(i, size=1000) * 2
        futures.append(rpc.rpc_async("w1", add, (tensor, tensor)))
        tensor.fill_(-1)
        del tensor
    for i, future in enumerate(futures):
        assert values(future.wait()) == [4 * i] * 1000


def stream_of_call(tensor):
    return sim.current_stream(1).stream_id, sim.default_stream(1).stream_id


@with_group
def test_functions_have_streams_of_their_own():
    streams = [rpc.rpc_sync("w1", stream_of_call, (full(1),)) for _ in range(3)]
    assert all(stream != default for stream, default in streams)
    assert len({stream for stream, _ in streams}) > 1


parameter = None


def make_parameter():
    global parameter
    parameter = torch.zeros(1000, device=THERE)


def increase(by):
    parameter.add_(by)


def get_parameter():
    return parameter


@with_group
def test_what_a_call_changed_is_seen_by_the_next():
    rpc.rpc_sync("w1", make_parameter)
    for _ in range(5):
        rpc.rpc_sync("w1", increase, (1,))
    assert values(rpc.rpc_sync("w1", get_parameter)) == [5] * 1000
    rpc.rpc_sync("w1", increase, (full(2, size=1000),))
    assert values(rpc.rpc_sync("w1", get_parameter)) == [7] * 1000


def doubled_value(rref):
    return rref.local_value() * 2


@with_group
def test_the_value_of_an_rref_is_there_when_it_is_used():
    rref = rpc.remote("w1", add, (full(1), full(2)))
    futures = [rpc.rpc_async("w1", doubled_value, (rref,)) for _ in range(5)]
    assert values(rref.to_here()) == [3] * 4
    assert [values(future.wait()) for future in futures] == [[6] * 4] * 5
    assert values(rpc.rpc_sync("w1", fetch_from_w1, (rref,))) == [3] * 4


def fetch_from_w1(rref):
    return rref.to_here()


def slow_double(rref):
    sim._sleep(20_000_000)
    return rref.local_value() * 2


@with_group
def test_a_value_may_be_released_while_a_function_uses_it():
    for size in (4, 100_000):
        rref = rpc.remote("w1", add, (full(1, size=size), full(2, size=size)))
        future = rpc.rpc_async("w1", slow_double, (rref,))
        del rref
        assert values(future.wait()) == [6] * size


@with_group
def test_an_rref_of_a_value_that_is_being_computed():
    stream = torch.Stream(device="sim:1")
    with stream:
        value = full(1, "sim:1")
        with sim.hold(stream):
            value = value + 1
            mine = rpc.RRef(value)
    # On the default stream now.
    assert values(mine.local_value()) == [2] * 4
    assert rpc.rpc_sync("w1", to_here_values, (mine,)) == ("sim:3", [2] * 4)


def to_here_values(rref):
    value = rref.to_here()
    return str(value.device), value.cpu().tolist()


def slow_add(a, b):
    sim._sleep(20_000_000)
    return a + b


@with_group
def test_a_result_can_be_used_on_any_stream():
    future = rpc.rpc_async("w1", slow_add, (full(1), full(2)))
    with torch.Stream(device=HERE):
        assert values(future.wait() + 1) == [4] * 4
    results = []
    chained = rpc.rpc_async("w1", slow_add, (full(1), full(2))).then(lambda done: done.wait() * 2)
    thread = threading.Thread(target=lambda: results.append(values(chained.wait() + 1)))
    thread.start()
    thread.join()
    assert results == [[7] * 4]


@rpc.functions.async_execution
def async_add(to, a, b):
    return rpc.rpc_async(to, add, (a, b, "sim:2")).then(lambda done: done.wait() + 1)


@with_group
def test_functions_that_return_futures():
    assert values(rpc.rpc_sync("w1", async_add, ("w2", full(1), full(2)))) == [4] * 4


@with_group
def test_the_host_can_call_while_a_device_is_busy():
    with sim.hold(sim.default_stream(3)):
        busy = full(1, "sim:3") + 1
        assert values(rpc.rpc_sync("w1", add, (full(1), full(2)))) == [3] * 4
    assert values(busy) == [2] * 4


# --- mistakes and failures ---


@with_group
def test_a_tensor_of_an_unmapped_device_is_refused():
    with pytest.raises(
        RuntimeError, match=r"only supports CPU tensors by default.*destination w1.*sim:2 of w0.*set_device_map"
    ):
        rpc.rpc_sync("w1", devices_of, (full(1, "sim:2"),))
    with pytest.raises(RuntimeError, match=r"Response device mapping.*destination w0.*sim:3 of w1"):
        rpc.rpc_sync("w1", full, (1, "sim:3"))
    with pytest.raises(RuntimeError, match="destination w1"):
        rpc.remote("w1", devices_of, (full(1, "sim:2"),)).to_here()
    assert values(rpc.rpc_sync("w1", torch.add, (full(1), full(2)))) == [3] * 4


def limit_memory(size):
    if size is None:
        sim.set_memory_limit(THERE, 1 << 60)
    else:
        sim.set_memory_limit(THERE, sim.memory_allocated(THERE) + size)


@with_group
def test_a_call_fails_if_the_memory_of_the_device_does_not_suffice():
    before = sim.memory_allocated(HERE)
    rpc.rpc_sync("w1", limit_memory, (1 << 20,))
    try:
        with pytest.raises(
            RuntimeError, match=r"(?s)w1 could not put the tensors of a message from w0 on sim:1.*memory"
        ):
            rpc.rpc_sync("w1", devices_of, (torch.ones(1 << 20, device=HERE),))
        assert rpc.rpc_sync("w1", devices_of, (full(1),)) == ["sim:1"]
    finally:
        rpc.rpc_sync("w1", limit_memory, (None,))
    eventually(lambda: sim.memory_allocated(HERE) <= before)  # what the failed call has lent is back
    sim.set_memory_limit(HERE, sim.memory_allocated(HERE) + (1 << 20))
    try:
        with pytest.raises(
            RuntimeError, match=r"(?s)w0 could not put the tensors of a message from w1 on sim:0.*memory"
        ):
            rpc.rpc_sync("w1", full, (1, "sim:1", 1 << 20))
    finally:
        sim.set_memory_limit(HERE, 1 << 60)


def allocated():
    for index in range(sim.device_count()):
        sim.synchronize(index)
    return [sim.memory_allocated(index) for index in range(sim.device_count())]


@with_group
def test_calls_leave_no_memory_behind():
    def all_allocated():
        return rpc.rpc_sync("w0", allocated) + rpc.rpc_sync("w1", allocated)

    rpc.rpc_sync("w1", torch.add, (full(1, size=100_000), full(2, size=100_000)))
    before = all_allocated()  # may still count the values of this call, so the ten below may end with less
    for _ in range(10):
        rpc.rpc_sync("w1", torch.add, (full(1, size=100_000), full(2, size=100_000)))
        rpc.remote("w1", torch.add, (full(1, size=100_000), full(2, size=100_000))).to_here()
    eventually(lambda: all(map(operator.le, all_allocated(), before)))


# --- autograd, optimizers, modules ---


def product(a, b):
    return a * b


def product_of_products(a, b):
    return rpc.rpc_sync("w2", product, (a, b)) * a


@with_group
@pytest.mark.parametrize("mode", ["fast", "smart"])
def test_gradients_come_back_to_the_devices_of_their_leaves(mode):
    for function, worker, degree in ((product, "w1", 1), (product, "w2", 1), (product_of_products, "w1", 2)):
        a, b = full(3, requires_grad=True), full(5, requires_grad=True)
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync(worker, function, (a, b)).sum()
            dist_autograd.backward(context, [loss], mode=mode)
            gradients = dist_autograd.get_gradients(context)
            assert gradients[a].device == gradients[b].device == torch.device(HERE)
            assert values(gradients[a]) == [degree * 3 ** (degree - 1) * 5] * 4
            assert values(gradients[b]) == [3**degree] * 4


@with_group
def test_gradients_of_leaves_on_several_streams_and_workers():
    rref = rpc.remote("w1", leaf_of_w1, (THERE,))
    stream = torch.Stream(device=HERE)
    with dist_autograd.context() as context:
        a = full(3, requires_grad=True)
        with stream:
            stream.wait_stream(sim.default_stream(0))
            b = full(2, requires_grad=True)
            c = b * 2
        sim.default_stream(0).wait_stream(stream)
        loss = rpc.rpc_sync("w1", multiply_by, (rref, a * c)).sum()
        dist_autograd.backward(context, [loss])
        gradients = dist_autograd.get_gradients(context)
        assert values(gradients[a]) == [4 * 7] * 4
        assert values(gradients[b]) == [2 * 3 * 7] * 4
        assert rpc.rpc_sync("w1", gradient_of, (rref, context)) == [12] * 4


def leaf_of_w1(device):
    return full(7, device, requires_grad=True)


def multiply_by(rref, tensor):
    return rref.local_value() * tensor


def gradient_of(rref, context):
    return values(dist_autograd.get_gradients(context)[rref.local_value()])


def linear_of_w1():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2).to(THERE)


def parameters_of(rref):
    return [rpc.RRef(parameter) for parameter in rref.local_value().parameters()]


def forward(rref, tensor):
    return rref.local_value()(tensor)


@with_group
def test_a_model_is_trained_as_without_rpc():
    local = linear_of_w1().cpu()
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    expected = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = local(inputs).square().mean()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    model = rpc.remote("w1", linear_of_w1)
    parameters = rpc.rpc_sync("w1", parameters_of, (model,))
    remote_optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1, momentum=0.9)
    losses = []
    on_device = inputs.to(HERE)
    for _ in range(5):
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync("w1", forward, (model, on_device)).square().mean()
            dist_autograd.backward(context, [loss])
            remote_optimizer.step(context)
            losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]


@with_group
def test_a_remote_module_on_a_device():
    module = RemoteModule("w1/sim:1", torch.nn.Linear, args=(4, 2))
    result = module(torch.ones(3, 4, device=HERE))
    assert result.device == torch.device(HERE)
    assert module.forward_async(torch.ones(3, 4, device=HERE)).wait().shape == (3, 2)
    assert rpc.rpc_sync("w1", parameter_devices, (module.get_module_rref(),)) == ["sim:1"] * 2


def parameter_devices(rref):
    return [str(parameter.device) for parameter in rref.local_value().parameters()]


# --- programs ---


def program(path, *arguments, **variables):
    """Run a Python program of this tree in processes that all have the simulated devices."""
    isolated.skip_unless_built()
    path.joinpath("sitecustomize.py").write_text("import sim\n\nsim.load()\n")
    folders = [str(path), str(Path(sim.__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "SIM_START_DELAY_S": "0.0001", **variables}
    command = [sys.executable, "-m", "torchrpc", *arguments]
    run = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.timeout(400)
def test_a_parameter_server_on_a_device(tmp_path):
    tutorial = Path(__file__).parents[2] / "tutorials" / "parameter_server.py"
    options = ("--device=sim", "--images=320", "--epochs=2", "--lr=0.1")
    output = program(tmp_path, str(tutorial), *options, MASTER_PORT=str(free_port()))
    start, end = map(float, re.search(r"loss ([\d.]+) at the start, ([\d.]+) at the end", output).groups())
    assert end < 0.8 * start


@pytest.mark.timeout(400)
def test_the_doctor_names_the_devices(tmp_path):
    output = program(tmp_path, "doctor")
    assert "accelerators: sim:0, sim:1, sim:2, sim:3" in output
    assert "through pinned host memory" in output
    for index in range(4):
        assert f"sim:{index}: to another process of this machine in shared memory of the device" in output


@pytest.mark.timeout(400)
def test_the_doctor_says_why_devices_share_no_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("SIM_SHARING", "refused")
    output = program(tmp_path, "doctor")
    assert "sim:0: to another process of this machine through host memory: cannot map shared memory of sim:0" in output


@pytest.mark.timeout(400)
def test_tensors_arrive_whole_by_each_way(tmp_path):
    output = program(tmp_path, str(Path(__file__).parents[1] / "gpu" / "ways.py"), "--device=sim")
    assert output.count("in shared memory of the device") == output.count("through host memory") == 2


@pytest.mark.timeout(400)
def test_the_benchmark_of_devices(tmp_path):
    benchmark = Path(__file__).parents[2] / "benchmarks" / "devices.py"
    output = program(tmp_path, str(benchmark), "--device=sim", "--sizes=4K,1M", "--seconds=0.05", "--rpc=torchrpc")
    assert re.search(r"\| 1M \| echo \| [\d,.]+ µs \|", output)
