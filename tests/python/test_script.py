"""Script functions and script modules as the target or an argument of a call."""

import pytest
import torch
from torch import Tensor, nn

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.testing import workers


@torch.jit.script
def scale(x: Tensor, factor: float, offset: int = 1):
    return x * factor + offset


@torch.jit.script
def describe(numbers: list[int], named: dict[str, Tensor], maybe: float | None = None) -> tuple[int, list[str], bool]:
    return sum(numbers), list(named.keys()), maybe is None


@torch.jit.script
def fork_and_wait(x: Tensor) -> Tensor:
    future = torch.jit.fork(scale, x, 2.0)
    return torch.jit.wait(future)


@torch.jit.script
def refuse(x: Tensor) -> Tensor:
    if x.numel() > 1:
        raise ValueError("one number, please")
    return x


@rpc.functions.async_execution
@torch.jit.script
def scale_later(x: Tensor) -> torch.jit.Future[Tensor]:
    return torch.jit.fork(scale, x, 3.0)


@rpc.functions.async_execution
@torch.jit.script
def not_later(x: Tensor) -> Tensor:
    return x


@torch.jit.script
class Pair:
    def __init__(self, a: int, b: int):
        self.a = a
        self.b = b


@torch.jit.script
def make_pair(a: int) -> Pair:
    return Pair(a, a + 1)


@torch.jit.interface
class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pass


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@torch.jit.script
def apply(layer: Layer, x: Tensor) -> Tensor:
    return layer.forward(x)


@pytest.fixture(scope="module")
def group():
    with workers(2) as names:
        yield names


@pytest.fixture(params=[0, 1])
def to(group, request):
    return group[request.param]


def test_a_script_function_runs_remotely_with_its_defaults(to):
    x = torch.ones(2)
    assert rpc.rpc_sync(to, scale, (x, 2.0)).equal(torch.full((2,), 3.0))
    assert rpc.rpc_async(to, scale, (x,), {"offset": 5, "factor": 3}).wait().equal(torch.full((2,), 8.0))
    assert rpc.remote(to, scale, (x, 2.0)).to_here().equal(torch.full((2,), 3.0))


def test_typed_containers_arrive_with_the_types_of_the_function(to):
    assert rpc.rpc_sync(to, describe, ([1, 2], {"a": torch.ones(1)})) == (3, ["a"], True)
    assert rpc.rpc_sync(to, describe, ([], {}), {"maybe": 1}) == (0, [], False)


def test_wrong_arguments_of_a_script_function_raise_at_the_caller(to):
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(RuntimeError, match=r"scale\(\) expected at most 3 argument"):
            call(to, scale, (torch.ones(1), 1.0, 1, 1))
        with pytest.raises(RuntimeError, match="factor"):
            call(to, scale, (torch.ones(1), "two"))


def test_errors_of_a_script_function_become_runtime_errors_that_name_the_worker(to):
    with pytest.raises(RuntimeError, match=f"(?s)On WorkerInfo.*name={to}.*one number, please"):
        rpc.rpc_sync(to, refuse, (torch.ones(2),))
    with pytest.raises(RuntimeError, match="one number, please"):
        rpc.remote(to, refuse, (torch.ones(2),)).to_here()


def test_a_script_function_may_fork_and_wait(to):
    assert rpc.rpc_sync(to, fork_and_wait, (torch.ones(1),)) == 3
    assert rpc.rpc_sync(to, scale_later, (torch.ones(1),)) == 4
    assert rpc.remote(to, scale_later, (torch.ones(1),)).to_here() == 4


def test_an_async_script_function_must_return_a_future(to):
    with pytest.raises(RuntimeError, match="Async functions must return an IValue of Future type, but got Tensor"):
        rpc.rpc_sync(to, not_later, (torch.ones(1),))


def test_a_script_function_takes_part_in_distributed_autograd(to):
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [rpc.rpc_sync(to, scale, (x, 3.0)).sum()])
        assert dist_autograd.get_gradients(context)[x].equal(torch.full((2,), 3.0))


def second_of(rref):
    return rref.local_value().b


def test_a_value_that_only_torchscript_can_hold_stays_on_its_owner(to):
    rref = rpc.remote(to, make_pair, (3,))
    assert rpc.rpc_sync(to, second_of, (rref,)) == 4


def test_a_missing_script_function_is_named(group):
    @torch.jit.script
    def local(x: Tensor) -> Tensor:
        return x

    with pytest.raises(RuntimeError, match=r"undefined function local: worker1 has no such"):
        rpc.rpc_sync("worker1", local, (torch.ones(1),))


def call_forward(module, x):
    return module(x)


def test_a_script_module_is_an_argument_and_a_result(to):
    module = torch.jit.script(Doubling())
    assert rpc.rpc_sync(to, call_forward, (module, torch.ones(1))) == 2
    assert rpc.rpc_sync(to, apply, (module, torch.ones(1))) == 2
    back = rpc.rpc_sync(to, torch.jit.script, (Doubling(),))
    assert isinstance(back, torch.jit.ScriptModule)
    assert back(torch.full((1,), 4.0)) == 8


def test_an_rref_to_a_script_module_needs_its_interface(group):
    module = torch.jit.script(Doubling())
    with pytest.raises(RuntimeError, match="must provide its ModuleInterface type hint"):
        rpc.RRef(module)
    assert rpc.RRef(module, type_hint=Layer).to_here() is module


def test_an_rref_for_a_script_function_is_refused_with_advice(to):
    rref = rpc.RRef(torch.ones(1))
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(
            RuntimeError, match=rf"argument factor \(RRef\) of the call of .*scale to {to}: TorchScript"
        ):
            call(to, scale, (torch.ones(1),), {"factor": rref})


def test_rrefs_cannot_be_saved_in_script_modules():
    rpc._disable_jit_rref_pickle()  # as it is anyway
    with pytest.raises(RuntimeError, match="cannot save script modules with RRefs"):
        rpc._enable_jit_rref_pickle()


CALLS_INSIDE = """
import tempfile
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

@torch.jit.script
def scale(x, factor: float = 2.0, offset: int = 0):
    return x * factor + offset

@torch.jit.script
def call(to: str, x):
    both = rpc.rpc_async(to, scale, (x,), {"factor": 3.0}).wait() + rpc.rpc_sync(to, scale, (x, 1.0, 1))
    return both

@torch.jit.script
def call_in_a_fork(to: str, x):
    return torch.jit.wait(torch.jit.fork(call, to, x))

@torch.jit.script
def gradients(context: int, loss):
    dist_autograd.backward(context, [loss])
    return dist_autograd.get_gradients(context)

with tempfile.NamedTemporaryFile() as file:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file.name}")
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    x = torch.ones(1, requires_grad=True)
    print(call("me", x).item())
    with dist_autograd.context() as context:
        print(gradients(context, call_in_a_fork("me", x).sum())[x].item())
    rpc.shutdown()
"""


def test_script_functions_make_calls_and_run_backward_passes(run_python, tmp_path):
    script = tmp_path / "calls_inside.py"
    script.write_text(CALLS_INSIDE)
    assert run_python("-W", "ignore", "-m", "torchrpc", script).stdout.split() == ["5.0", "4.0"]
