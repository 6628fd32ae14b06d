"""RemoteModule: an nn.Module on another worker."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.nn import RemoteModule
from torchrpc.nn.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES, _RemoteModule, _run_forward
from torchrpc.testing import workers

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(3) as names:
        yield names


class Scale(nn.Module):
    def __init__(self, factor, *, bias=0.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(float(factor)))
        self.inner = nn.Linear(1, 1)
        self.bias = bias

    def forward(self, x, *, times=1):
        return {"value": x * self.factor * times + self.bias, "worker": rpc.get_worker_info().name}


class Unplaceable(nn.Module):
    def to(self, device):
        raise ValueError(f"no room on {device}")


class Hybrid(nn.Module):
    def __init__(self, remote):
        super().__init__()
        self.local = nn.Linear(2, 2)
        self.remote = remote

    def forward(self, x):
        return self.remote(self.local(x))


def call(modules, x):
    return [module(x)["value"] for module in modules["all"]], modules["all"][0].on


def is_training(rref):
    return rref.local_value().training


def scale(to="worker1", *args, **kwargs):
    return RemoteModule(to, Scale, args=args or (3,), kwargs=kwargs)


def test_forward_runs_where_the_module_is():
    result = scale("worker1", 3, bias=0.5)(torch.ones(2), times=2)
    assert result["value"].tolist() == [6.5, 6.5] and result["worker"] == "worker1"


def test_forward_async_returns_a_future():
    future = scale().forward_async(torch.ones(1))
    assert isinstance(future, torch._C.Future)
    assert future.wait()["value"].item() == 3


@pytest.mark.parametrize(
    "remote_device, on, owner",
    [
        ("worker2", "worker2", "worker2"),
        ("worker2/cpu", "worker2", "worker2"),
        ("rank:2", 2, "worker2"),
        ("rank:2/cpu", 2, "worker2"),
        ("cpu", "worker0", "worker0"),
    ],
)
def test_it_is_created_on_the_remote_device(remote_device, on, owner):
    module = scale(remote_device)
    assert (module.on, module.device, module(torch.ones(1))["worker"]) == (on, "cpu", owner)


@pytest.mark.parametrize(
    "remote_device, kind, text",
    [
        ("worker1/gpu:0", RuntimeError, "Expected one of .+ device type at start of device string: gpu"),
        ("worker1/", RuntimeError, "Device string must not be empty"),
        ("/cpu", ValueError, "Could not parse remote_device: /cpu. The valid format is '<workername>/<device>'"),
        ("worker1/cpu/cpu", ValueError, "Could not parse remote_device: worker1/cpu/cpu"),
        ("worker9", RuntimeError, "worker9"),
        (7, TypeError, "Invalid type for remote_device"),
    ],
)
def test_an_invalid_remote_device_is_refused_at_once(remote_device, kind, text):
    with pytest.raises(kind, match=text):
        scale(remote_device)


def test_an_invalid_module_cls_is_refused():
    with pytest.raises(TypeError, match="module_cls must be a class or function that makes a module, but is 3"):
        RemoteModule("worker1", 3)
    with pytest.raises(ValueError, match=r"returns an instance of <class nn.Module>, but it returns an instance of"):
        RemoteModule("worker1", dict)()


def test_a_device_that_the_owner_lacks_is_named():
    with pytest.raises(RuntimeError, match="worker1 cannot place a Unplaceable on its device cpu: no room on cpu"):
        RemoteModule("worker1", Unplaceable)()


def test_tensors_move_to_the_module_s_device_and_back():
    rref = rpc.RRef(nn.Identity())
    moved = _run_forward(rref, "meta", True, ([torch.ones(2), "text"],), {})
    assert moved[0].device.type == "meta" and moved[1] == "text"


def test_a_repeated_tensor_is_returned_as_one_tensor_without_a_device_map(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: "on the CPU")
    assert _run_forward(rpc.RRef(nn.Identity()), "meta", False, (torch.ones(3),), {}) == "on the CPU"


def test_remote_parameters_are_references_to_the_owners_parameters():
    module = scale()
    rrefs = module.remote_parameters()
    assert [rref.owner_name() for rref in rrefs] == ["worker1"] * 3
    assert rrefs[0].to_here().item() == 3
    assert len(module.remote_parameters(recurse=False)) == 1


def gradient_of_factor(context_id, rref):
    return dist_autograd.get_gradients(context_id)[rref.local_value().factor]


def test_gradients_stay_with_the_parameters_on_the_owner():
    module = scale()
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [module(x)["value"].sum()])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [3, 3]
        args = (context_id, module.get_module_rref())
        assert rpc.rpc_sync("worker1", gradient_of_factor, args=args).item() == 3


def test_train_and_eval_reach_the_module():
    module = scale()
    for mode, change in [(False, module.eval), (True, module.train), (False, lambda: module.train(False))]:
        assert change() is module
        assert rpc.rpc_sync("worker1", is_training, args=(module.get_module_rref(),)) is mode
        assert module.training is mode


def test_it_is_part_of_a_local_module():
    hybrid = Hybrid(RemoteModule("worker1", nn.Linear, args=(2, 1)))
    assert hybrid(torch.ones(4, 2)).shape == (4, 1)
    hybrid.eval()
    assert not rpc.rpc_sync("worker1", is_training, args=(hybrid.remote.module_rref,))
    assert "RemoteModule(on='worker1', device='cpu')" in repr(hybrid)


def test_it_can_be_sent_inside_other_objects_and_called_by_the_receiver():
    module = scale()
    values, on = rpc.rpc_sync("worker2", call, args=({"all": [module, module]}, torch.ones(1)))
    assert [value.item() for value in values] == [3, 3] and on == "worker1"
    assert rpc.rpc_sync("worker1", call, args=({"all": [module]}, torch.ones(1)))[0][0].item() == 3


def test_added_attributes_are_not_sent_and_cause_a_warning():
    module = scale()
    module.note = "mine"
    with pytest.warns(UserWarning, match=r"sent without the attributes that were added to it: \['note'\]") as warned:
        sent = rpc.rpc_sync("worker1", vars, args=(module,))
    assert [each.filename for each in warned] == [__file__]
    assert list(sent) == [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]


@pytest.mark.parametrize("copying", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_pickled_for_rpc_only(copying):
    with pytest.raises(RuntimeError, match="RemoteModule can only be pickled when using RPC"):
        copying(scale())


def test_several_can_share_a_module():
    module = scale()
    other = rpc.rpc_sync("worker2", RemoteModule.init_from_module_rref, args=("worker2", module.get_module_rref()))
    assert other.on == "worker1"
    assert other(torch.ones(1))["value"].item() == 3
    assert other.remote_parameters()[0].to_here().item() == 3


def test_methods_that_would_not_reach_the_module_are_refused():
    module = scale()
    for name in ["state_dict", "to", "cuda", "modules", "register_full_backward_hook", "zero_grad", "extra_repr"]:
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(module, name)()
    with pytest.raises(ValueError, match="Please use ``remote_parameters`` instead"):
        module.parameters()


class RemoteLeaves(torch.fx.Tracer):
    """As fairscale's make_graph: RemoteModules have torch's methods for the names of modules while it traces."""

    def is_leaf_module(self, module, name):
        return isinstance(module, RemoteModule) or super().is_leaf_module(module, name)

    def trace(self, root, *args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RemoteModule, "named_modules", nn.Module.named_modules)
            patch.setattr(RemoteModule, "named_children", nn.Module.named_children)
            return super().trace(root, *args)


def linear():
    return RemoteModule("worker1", nn.Linear, (2, 2))


def test_fx_records_a_call_of_it_as_one_of_a_leaf():
    model = Hybrid(linear())
    graph = RemoteLeaves().trace(model)
    assert [(node.op, node.target) for node in graph.nodes if node.op == "call_module"] == [
        ("call_module", "local"),
        ("call_module", "remote"),
    ]
    x = torch.ones(3, 2)
    assert torch.equal(torch.fx.GraphModule(model, graph)(x), model(x))


def test_hooks_of_all_modules_and_its_own_see_a_call_of_it_wherever_it_was_made():
    seen = []
    sent = rpc.rpc_sync("worker2", same, args=(linear(),))
    for module in (linear(), sent):
        nn.Module.register_forward_pre_hook(module, lambda module, args: seen.append("own pre"))
        nn.Module.register_forward_hook(module, lambda module, args, out: seen.append("own"))
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(lambda module, args: seen.append("pre")),
            nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 0),
        ]
        try:
            assert module(torch.ones(1, 2)).tolist() == [[0, 0]]
        finally:
            for hook in hooks:
                hook.remove()
        assert seen == ["pre", "own pre", "own"]
        assert module.forward(torch.ones(1, 2)).shape == (1, 2)
        assert len(seen) == 3
        seen.clear()


def same(value):
    return value


def test_a_call_of_it_calls_a_forward_that_the_program_has_replaced():
    module = linear()
    module.forward = lambda x: x
    assert module(7) == 7


class OnRank(_RemoteModule):
    """A subclass as programs write it for torch."""

    def __init__(self, remote_device, make):
        nn.Module.__init__(self)
        self.moves = self._prepare_init(remote_device)
        self.generated_methods = ()
        self.module_rref = rpc.remote(self.on, make)
        self._install_generated_methods()


def make_double():
    return nn.Identity()


def test_a_subclass_that_uses_the_methods_of_torchs_class_works():
    module = OnRank("worker2/cpu", make_double)
    assert (module.on, module.device, module.moves, module.is_scriptable) == ("worker2", "cpu", False, False)
    assert module(torch.ones(2)).tolist() == module.forward_async(torch.ones(2)).wait().tolist() == [1, 1]
    with pytest.raises(AttributeError, match=r"without attributes that were added to it: \['moves'\]"):
        module._check_attribute_picklability()
    scale()._check_attribute_picklability()


def test_the_reference_is_released_with_the_object():
    module = scale()
    module(torch.ones(1))
    rref = weakref.ref(module.module_rref)
    gc.disable()
    try:
        del module
        assert rref() is None
    finally:
        gc.enable()


def test_it_needs_rpc(run_python):
    text = "from torchrpc.nn import RemoteModule; RemoteModule('worker0', list)"
    assert "RuntimeError: RemoteModule only works in RPC. Call init_rpc" in run_python("-c", text, check=False).stderr


# --- TorchScript ---


@torch.jit.interface
class Interface:
    def forward(self, x: Tensor, times: int) -> tuple[Tensor, int]:
        pass


@torch.jit.interface
class AsyncInterface:
    def forward(self, x: Tensor, times: int) -> tuple[Tensor, int]:
        pass

    def forward_async(self, x: Tensor, times: int) -> torch.jit.Future[tuple[Tensor, int]]:
        pass


class Scripted(nn.Module):
    def __init__(self, factor: int):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, times: int) -> tuple[Tensor, int]:
        return x * self.factor * times, times


@torch.jit.script
def use(module: Interface) -> Tensor:
    return module.forward(torch.ones(1), 2)[0]


@torch.jit.script
def use_async(module: AsyncInterface) -> Tensor:
    first = module.forward_async(torch.ones(1), 2)
    second = module.forward_async(torch.ones(1), 3)
    return torch.jit.wait(first)[0] + torch.jit.wait(second)[0]


def scripted(factor):
    return torch.jit.script(_RemoteModule("worker1", Scripted, args=(factor,), _module_interface_cls=Interface))


def test_a_script_can_call_it():
    three, five = scripted(3), scripted(5)
    gc.collect()
    assert [use(three).item(), use(five).item()] == [6, 10]
    assert use_async(three).item() == 15
    assert three(torch.ones(1), 2)[1] == 2


def test_a_script_gets_the_error_of_the_owner():
    with pytest.raises(Exception, match="Expect `module_cls"):
        use(torch.jit.script(_RemoteModule("worker1", dict, _module_interface_cls=Interface)))


def test_the_interface_is_checked():
    with pytest.raises(AssertionError, match=r"Expect a TorchScript class interface decorated by @torch.jit.interface"):
        _RemoteModule("worker1", Scripted, args=(3,), _module_interface_cls=Scripted)
    with pytest.raises(RuntimeError, match="it was made without _module_interface_cls"):
        torch.jit.script(scale())


def test_a_compiled_one_cannot_be_sent():
    with pytest.raises(RuntimeError, match="Passing a script RemoteModule over RPC is not supported"):
        rpc.rpc_sync("worker2", id, args=(scripted(3),))


def test_one_with_an_interface_can_be_sent_and_compiled_by_the_receiver():
    module = _RemoteModule("worker1", Scripted, args=(3,), _module_interface_cls=Interface)
    assert rpc.rpc_sync("worker2", compile_and_use, args=(module,)).item() == 6


def compile_and_use(module):
    return use(torch.jit.script(module))
