"""Which methods of an object behind an RRef a worker with `allowed_functions` runs: those that its listed class has
from its own package.
"""

import collections
import contextlib
import functools
import os
import pickle
import subprocess
import sys

import pytest
import torch

import torchrpc
import torchrpc.rpc as rpc
from torchrpc import _C
from torchrpc import autograd as dist_autograd
from torchrpc.nn import RemoteModule
from torchrpc.nn.remote_module import _RemoteModule
from torchrpc.optim import DistributedOptimizer
from torchrpc.rpc import NotAllowedError, rref_proxy
from torchrpc.rpc._security.allow_list import check_method, find_listed, resolve
from torchrpc.testing import workers

HERE = __name__


class Fake:
    """Stands for the list of a worker."""

    worker, callers, is_for_member = "worker0", "*", True

    def __init__(self, *entries):
        self.names = {entry for entry in entries if not entry.endswith("*")}
        self.prefixes = [entry for entry in entries if entry.endswith("*")]

    def entry_for(self, name):
        if name in self.names:
            return name
        return next((prefix for prefix in self.prefixes if name.startswith(prefix[:-1])), "")


@pytest.fixture
def listed(monkeypatch):
    """A function that checks a method under a list of these entries, as `init_rpc` reads them."""

    def check(value, name, *entries, **options):
        names = resolve([entry if isinstance(entry, str) else f"{HERE}.{entry.__qualname__}" for entry in entries])
        monkeypatch.setattr(_C, "_allow_list", lambda: Fake(*names))
        check_method(value, name, **options)
        return True

    return check


def refusal(check, *args, **options):
    with pytest.raises(NotAllowedError, match="worker0 does not let others run or send") as raised:
        check(*args, **options)
    return str(raised.value)


# --- Classes of the program ---


def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def noted(function):
    """A decorator that keeps nothing of the function."""
    return lambda *args: function(*args)


class Base:
    def inherited(self):
        return "inherited"


class Shop(Base):
    """Its methods are of many kinds, and all of its own package."""

    def plain(self):
        return "plain"

    @classmethod
    def of_class(cls):
        return cls.__name__

    @staticmethod
    def static():
        return "static"

    @functools.lru_cache  # noqa: B019
    def cached(self):
        return "cached"

    @staticmethod
    @functools.cache
    def cached_static():
        return "cached"

    @logged
    def decorated(self):
        return "decorated"

    @torch.no_grad()
    def decorated_by_torch(self):
        return torch.is_grad_enabled()

    async def coroutine(self):
        return "coroutine"

    @rpc.functions.async_execution
    def asynchronous(self):
        future = torch.futures.Future()
        future.set_result("asynchronous")
        return future

    @staticmethod
    @rpc.functions.async_execution
    def asynchronous_static():
        future = torch.futures.Future()
        future.set_result("asynchronous")
        return future

    @torchrpc.batched(timeout=0, stack=False)
    def batched(self, numbers):
        return [2 * number for number in numbers]

    def generator(self):
        yield 1

    async def asynchronous_generator(self):
        yield 1

    partial = functools.partialmethod(lambda self, number: number, 5)
    function = noted(plain)

    @functools.singledispatchmethod
    def dispatched(self, value):
        return "an object"

    @dispatched.register
    def _(self, value: int):
        return "an int"


RESULTS = {
    "plain": "plain",
    "of_class": "Shop",
    "static": "static",
    "cached": "cached",
    "cached_static": "cached",
    "decorated": "decorated",
    "decorated_by_torch": False,
    "coroutine": "coroutine",
    "asynchronous": "asynchronous",
    "asynchronous_static": "asynchronous",
    "partial": 5,
    "inherited": "inherited",
    "function": "plain",
}


class Callback:
    def __call__(self):
        return "called"


def add_one(value: torch.Tensor) -> torch.Tensor:
    return value + 1


class Foreign:
    """Its callable attributes are of other packages, or nothing says which code they run."""

    system = staticmethod(os.system)
    bare = os.getpid
    loads = staticmethod(pickle.loads)
    run = subprocess.run
    static_run = staticmethod(subprocess.run)
    of_class = classmethod(os.path.join)
    logged_run = logged(subprocess.run)
    logged_system = staticmethod(logged(os.system))
    logged_static = logged(staticmethod(subprocess.run))
    cached_run = functools.lru_cache(subprocess.run)
    partial_method = functools.partialmethod(subprocess.run, "true")
    partial = functools.partial(subprocess.run, "true")
    own_partial = functools.partial(add_one, 1)
    bound = collections.Counter().update
    upper = str.upper
    fromkeys = dict.fromkeys
    maketrans = str.maketrans
    of_pybind = torch._C.Future.done
    callback = Callback()
    script = torch.jit.script(add_one)
    ufunc = torch.add
    operator = torch.ops.aten.add
    kind = dict

    @functools.singledispatchmethod
    def dispatched(self, value):
        return "an object"

    dispatched.register(int, subprocess.run)

    @property
    def watched(self):
        raise AssertionError("a property has run")

    @functools.cached_property
    def kept(self):
        raise AssertionError("a property has run")


class Text(str):
    def shout(self):
        return self.upper() + "!"


class OwnCounter(collections.Counter):
    def total_of_all(self):
        return sum(self.values())


class OwnFuture(torch.futures.Future):
    pass


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, value):
        return self.linear(value)


class Chain(torch.nn.Sequential):
    """Inherits its forward."""


class Slow(Net):
    def compile(self):
        return "the program's own"


class OwnSGD(torch.optim.SGD):
    """Inherits its step."""


class Meta(type):
    def of_meta(cls):
        return "of the metaclass"


class Hidden(metaclass=Meta):
    of_meta = staticmethod(os.getpid)


class Heir(Hidden):
    pass


class Ordinary(metaclass=Meta):
    pass


def text_of(value):
    return Text(value)


def make_net():
    return Net()


# --- Methods that a listed class has ---


@pytest.fixture(scope="module")
def group():
    allowed = [f"{HERE}.*", f"{HERE}.Net.state_dict", f"{HERE}.Foreign.bare", f"{HERE}.Text.upper"]
    with workers(2, allowed_functions=allowed):
        yield


@pytest.mark.parametrize("name", RESULTS)
def test_a_method_of_the_own_package_runs(group, name):
    shop = rpc.remote("worker1", Shop)
    assert getattr(shop.rpc_sync(), name)() == RESULTS[name]


def test_methods_with_arguments_run(group):
    shop = rpc.remote("worker1", Shop)
    assert shop.rpc_sync().batched(4) == 8
    assert [shop.rpc_sync().dispatched(value) for value in (1, "a")] == ["an int", "an object"]


def test_a_generator_is_no_result_and_its_methods_are_not_called(group):
    shop = rpc.remote("worker1", Shop)
    for name in ("generator", "asynchronous_generator"):
        with pytest.raises(rpc.SerializationError, match="cannot pickle"):
            getattr(shop.rpc_sync(), name)()
    values = shop.remote().generator()
    for name in ("send", "throw", "close"):
        with pytest.raises(NotAllowedError, match=rf"builtins\.generator\.{name}"):
            getattr(values.rpc_sync(), name)(None)


# --- Methods that a listed class inherits from elsewhere ---


INHERITED = [
    (Net, "compile", "nn.modules.module.Module.compile"),
    (Net, "apply", "torch.nn.modules.module.Module"),
    (Net, "state_dict", "torch.nn.modules.module.Module"),
    (Net, "train", "torch.nn.modules.module.Module"),
    (Chain, "forward", "torch.nn.modules.container.Sequential"),
    (Text, "format", "builtins.str.format"),
    (Text, "format_map", "builtins.str.format_map"),
    (Text, "center", "builtins.str"),
    (OwnCounter, "update", "collections.Counter"),
    (OwnCounter, "setdefault", "builtins.dict"),
    (OwnFuture, "done", "torch.jit.Future"),
    (OwnSGD, "state_dict", "torch.optim.optimizer.Optimizer"),
]


@pytest.mark.parametrize(("kind", "name", "origin"), INHERITED)
@pytest.mark.parametrize("entry", ["class", "package", "prefix of methods"])
def test_a_method_that_is_inherited_from_another_package_is_refused(listed, kind, name, origin, entry):
    options = {OwnSGD: ([torch.ones(1)],)}
    value = kind(*options.get(kind, ()))
    entries = {"class": kind, "package": f"{HERE}.*", "prefix of methods": f"{HERE}.{kind.__name__}.*"}[entry]
    text = refusal(listed, value, name, entries)
    assert f"{HERE}.{kind.__name__}.{name}: its allowed_functions do not have it" in text and origin in text
    if name in ("compile", "format", "format_map"):
        assert "and cannot have it" in text and "[..." not in text
    else:
        assert f"which the class inherits from {origin}" in text
        assert f"allowed_functions=[..., '{HERE}.{kind.__name__}.{name}']" in text
        assert listed(value, name, kind, f"{HERE}.{kind.__name__}.{name}")


def test_inherited_methods_do_not_run_through_an_rref(group, tmp_path):
    net = rpc.remote("worker1", make_net)
    trace = tmp_path / "trace"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {trace}\n")
    program.chmod(0o755)
    with pytest.raises(NotAllowedError, match=r"Net\.compile.*cannot have it"):
        net.rpc_sync().compile(backend="inductor", options={"cpp.cxx": (str(program),)})
    with pytest.raises(NotAllowedError, match=r"Net\.apply"):
        net.rpc_sync().apply(text_of)
    text = rpc.remote("worker1", text_of, args=("{0.__class__.__init__.__globals__}",))
    for name, args in (("format", (Shop(),)), ("format_map", ({},)), ("center", (10,))):
        with pytest.raises(NotAllowedError, match=rf"Text\.{name}"):
            getattr(text.rpc_sync(), name)(*args)
    assert not trace.exists()


def test_a_method_that_is_named_in_full_runs(group):
    net = rpc.remote("worker1", make_net)
    assert net.rpc_sync().state_dict().keys() == {"linear.weight", "linear.bias"}
    text = rpc.remote("worker1", text_of, args=("abc",))
    assert text.rpc_sync().shout() == "ABC!" and text.rpc_sync().upper() == "ABC"
    assert rpc.remote("worker1", Foreign).rpc_sync().bare() > 0


def test_an_entry_of_an_inherited_method_allows_it_for_its_class_only(listed):
    entry = f"{HERE}.Net.state_dict"
    assert resolve([entry]) == [entry]
    assert listed(Net(), "state_dict", entry)
    for value in (Slow(), torch.nn.Module(), torch.nn.Linear(1, 1)):
        refusal(listed, value, "state_dict", entry)
    with pytest.raises(NotAllowedError):
        find_listed("torch.nn.modules.module", "Module.state_dict", Fake(*resolve([entry])))


def test_the_methods_of_a_base_run_if_the_base_is_listed(listed):
    assert listed(Net(), "state_dict", Net, "torch.nn.Module")
    assert listed(Net(), "state_dict", Net, "torch.nn.*")
    assert listed(OwnCounter(), "update", OwnCounter, "collections.Counter")
    assert listed(torch.nn.Linear(1, 1), "forward", "torch.nn.Linear")
    assert listed(collections.deque(), "append", "collections.deque")
    assert listed(torch.Generator(), "manual_seed", "torch.Generator")
    assert "inherits" in refusal(listed, torch.nn.Linear(1, 1), "state_dict", "torch.nn.Linear")
    assert "inherits" in refusal(listed, torch.ones(1), "add", "torch.Tensor")
    assert listed(torch.ones(1), "add", "torch.Tensor.add")


@pytest.mark.parametrize("entry", ["torch.nn.Module", "torch.nn.*", "torch.nn.modules.*"])
def test_no_entry_allows_the_compiler_of_modules(listed, entry):
    for value in (Net(), torch.nn.Module(), torch.nn.Linear(1, 1)):
        refusal(listed, value, "compile", f"{HERE}.*", entry, "torch.nn.Linear")
    with pytest.raises(NotAllowedError, match=r"Module\.compile.*cannot have it"):
        find_listed("torch.nn.modules.module", "Module.compile", Fake(*resolve([entry])))
    assert listed(Slow(), "compile", Slow, entry)


def test_no_entry_allows_the_formatting_of_texts(listed):
    for value in ("", Text()):
        assert "cannot have it" in refusal(listed, value, "format", "builtins.str", Text)


# --- Attributes that are functions of other packages ---

UNSAFE = {"system", "loads", "run", "static_run", "logged_run", "logged_system", "logged_static", "cached_run"}
UNSAFE |= {"partial_method", "dispatched"}
OWN_METHODS = {name for name in vars(Foreign) if not name.startswith("_")} - {"watched", "kept", "kind"}


@pytest.mark.parametrize("name", sorted(OWN_METHODS))
def test_a_class_attribute_of_another_package_is_no_method(listed, name):
    text = refusal(listed, Foreign(), name, f"{HERE}.*", Foreign)
    assert f"Foreign.{name}: its allowed_functions do not have it" in text
    if name in UNSAFE:
        assert "and cannot have it: it is " in text and "[..." not in text
        with pytest.raises(ValueError, match="would let callers run any code"):
            resolve([f"{HERE}.Foreign.{name}"])
    elif name == "of_pybind":  # torch._C is private
        assert ", which is " in text and "[..." not in text
        with pytest.raises(ValueError, match="private function of a package"):
            resolve([f"{HERE}.Foreign.{name}"])
    else:
        assert ", which is " in text and f"[..., '{HERE}.Foreign.{name}']" in text
        assert listed(Foreign(), name, f"{HERE}.Foreign.{name}")


@pytest.mark.parametrize("name", ["watched", "kept", "kind", "nothing"])
def test_properties_and_classes_are_no_methods(listed, name):
    text = refusal(listed, Foreign(), name, Foreign)
    assert "[..." not in text


def test_foreign_functions_do_not_run_through_an_rref(group, tmp_path):
    trace = tmp_path / "trace"
    foreign = rpc.remote("worker1", Foreign)
    for name in ("system", "logged_system", "static_run", "loads"):
        with pytest.raises(NotAllowedError, match=rf"Foreign\.{name}"):
            getattr(foreign.rpc_sync(), name)(f"touch {trace}")
    assert not trace.exists()


def test_a_class_of_the_main_script_cannot_have_an_unsafe_function_by_its_full_name(monkeypatch):
    """Its entry is not looked up by init_rpc, because the script may define it later."""
    late = type("Late", (), {"system": staticmethod(os.system), "__module__": "__main__"})
    names = resolve(["__main__.Late.system"])
    monkeypatch.setattr(sys.modules["__main__"], "Late", late, raising=False)
    monkeypatch.setattr(_C, "_allow_list", lambda: Fake(*names))
    with pytest.raises(NotAllowedError, match="cannot have it"):
        check_method(late(), "system")


def test_a_class_does_not_hide_the_methods_of_its_metaclass(listed):
    assert listed(Ordinary, "of_meta", Meta)
    for cls in (Hidden, Heir):
        refusal(listed, cls, "of_meta", Meta)


def test_functions_of_c_belong_to_the_class_that_has_them(listed):
    monkeyed = type("Monkeyed", (torch._C.Future,), {"__module__": HERE, "then": torch._C.Future.wait})
    globals()["Monkeyed"] = monkeyed
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(globals().pop, "Monkeyed")
        assert "of another package" in refusal(listed, monkeyed([]), "then", f"{HERE}.Monkeyed")


# --- What the package itself calls ---


def test_a_remote_module_and_an_optimizer_run_methods_that_their_classes_inherit(group):
    """With a bare list of classes: these methods need no entry of their own."""
    for kind in (Net, Chain):
        module = RemoteModule("worker1", kind)
        assert module.train(False) is module and len(module.remote_parameters()) == (2 if kind is Net else 0)
        assert module(torch.ones(1, 2)).shape == ((1, 1) if kind is Net else (1, 2))
    module = RemoteModule("worker1", Net)
    for _ in range(2):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [module(torch.ones(1, 2)).sum()])
            optimizer = DistributedOptimizer(OwnSGD, module.remote_parameters(), lr=0.1)
            optimizer.step(context)
            optimizer.load_state_dict(optimizer.state_dict())


@torch.jit.interface
class Interface:
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        pass


def test_a_remote_module_that_is_compiled_runs_the_methods_of_its_class(group):
    module = _RemoteModule("worker1", Net, _module_interface_cls=Interface)
    assert module.forward(torch.ones(1, 2)).shape == (1, 1)
    assert module.train(False) is module and len(module.remote_parameters()) == 2


def make_script_module():
    return torch.jit.script(Net())


def test_a_script_module_runs_only_as_a_remote_module(group):
    module = rpc.remote("worker1", make_script_module)
    for name in ("forward", "save", "compile", "state_dict"):
        with pytest.raises(NotAllowedError, match=rf"RecursiveScriptModule\.{name}"):
            getattr(module.rpc_sync(), name)(torch.ones(1, 2))


def test_a_script_module_has_the_methods_of_its_class_only(listed):
    module = torch.jit.script(Net())
    for name in ("forward", "parameters", "train"):
        assert listed(module, name, Net, kind=Net, base=torch.nn.Module)
    module.__dict__["train"] = print
    refusal(listed, module, "train", Net, kind=Net, base=torch.nn.Module)


def call_method(rref, name, *args):
    return rpc.rpc_sync(rref.owner(), rref_proxy._call_method, args=(rref, name, args, {}))


def test_special_methods_need_their_full_name(group):
    net = rpc.remote("worker1", make_net)
    for name in ("__call__", "__getattr__", "__setattr__", "_call_impl"):
        with pytest.raises(NotAllowedError, match=rf"Net\.{name}"):
            call_method(net, name, torch.ones(1, 2))
