"""Workers with `allowed_functions`: only listed functions run, and only objects of listed classes are made."""

import builtins
import collections
import dataclasses
import enum
import ipaddress
import os
import subprocess
import sys
import types

import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc import _C, cpp_function
from torchrpc import autograd as dist_autograd
from torchrpc.nn import RemoteModule
from torchrpc.optim import DistributedOptimizer
from torchrpc.rpc import NotAllowedError, rref_proxy
from torchrpc.rpc._security.allow_list import find_allowed, resolve
from torchrpc.rpc._values.exceptions import _rebuild_exception
from torchrpc.testing import workers

REFUSED = r"worker1 does not let others run or send {}: its allowed_functions do not have it"


def double(value):
    return 2 * value


def triple(value):
    return 3 * value


def echo(value):
    return value


def raises_own_error():
    raise OwnError("mine")


class OwnError(Exception):
    pass


def loses_a_worker():
    raise rpc.WorkerLostError("gone", "worker2")


class Reduced(Exception):
    """Is rebuilt by a call that `allowed_functions` does not have."""

    calls: list = []  # noqa: RUF012

    def __reduce__(self):
        return Reduced.calls.append, (1,)


def raises_linked_errors():
    error = ValueError("top")
    error.__cause__ = KeyError("allowed, as all of Python's are")
    error.__cause__.__cause__ = OwnError("not allowed")
    error.__cause__.__cause__.__cause__ = Reduced("not allowed")
    raise error


def raises_os_error():
    error = FileNotFoundError(2, "text", "file")
    error.more = {"set": {1}}
    raise error


def raises_group():
    raise builtins.ExceptionGroup("two", [KeyError("a"), OwnError("b")])


def catch_from(worker, function):
    """Runs on worker1: calls a function of worker0 that fails, and returns the types of what arrives."""
    try:
        rpc.rpc_sync(worker, globals()[function])
    except Exception as error:
        names = [type(error).__name__, *(type(each).__name__ for each in getattr(error, "exceptions", ()))]
        while error := error.__cause__:
            names.append(type(error).__name__)
        return names


def rebuild_with_evil_links():
    """Runs on worker1: a detail whose links are objects of a class that is not listed."""
    detail = _C._encode_objects((b"", [_Hidden()], 0, 0), None)
    error = _rebuild_exception("text", detail, "worker0")
    assert "does not let others run or send" in str(error)
    return type(error).__name__


class Color(enum.Enum):
    RED = 1


class Size(enum.Enum):
    SMALL = "small"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Counter:
    def __init__(self, start=0):
        self.value = start

    def add(self, number):
        self.value += number
        return self.value

    def _secret(self):
        return "secret"

    @property
    def adder(self):
        return self.add


class _Hidden(Counter):
    pass


class Unlisted(Counter):
    pass


class Evil:
    """A pickle that calls os.system."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@torch.jit.script
def script_double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@torch.jit.script
def script_triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


# A script function travels to other processes only by name.
ALLOWED = [
    double,
    echo,
    Counter,
    Size,
    Access,
    torch.add,
    script_double.qualified_name,
    raises_own_error,
    raises_linked_errors,
    raises_group,
    raises_os_error,
    catch_from,
    rebuild_with_evil_links,
    loses_a_worker,
    torch.nn.Linear,
]


@pytest.fixture
def group():
    with workers(2, allowed_functions=ALLOWED):
        yield


def refused(function, *args, name=".*"):
    with pytest.raises(RuntimeError, match=REFUSED.format(name)):
        rpc.rpc_sync("worker1", function, args=args)


def test_listed_functions_run(group):
    assert rpc.rpc_sync("worker1", double, args=(21,)) == 42
    assert rpc.remote("worker1", double, args=(21,)).to_here() == 42
    assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)).item() == 2
    assert rpc.rpc_sync("worker1", script_double, args=(torch.ones(1),)).item() == 2


def test_functions_that_are_not_listed_do_not_run(group, tmp_path):
    trace = tmp_path / "trace"
    refused(triple, 1, name=rf"{triple.__module__}\.triple")
    refused(os.system, f"touch {trace}", name=r"posix\.system")
    refused(eval, f"open({str(trace)!r}, 'w')", name=r"builtins\.eval")
    refused(subprocess.getoutput, f"touch {trace}")
    with pytest.raises(RuntimeError, match=REFUSED.format(".*")):
        rpc.remote("worker1", os.system, args=(f"touch {trace}",)).to_here()
    assert not trace.exists()


def test_operators_script_functions_and_cpp_functions_are_refused_unless_listed(group):
    words = "does not let others run {}: its allowed_functions do not have it"
    for function, args, name in (
        (torch.mul, (torch.ones(1), 2), "aten::mul"),
        (script_triple, (torch.ones(1),), f"__torch__.{script_triple.qualified_name.split('.', 1)[1]}"),
        (cpp_function("f"), (), r"cpp_function\(f\)"),
    ):
        with pytest.raises(RuntimeError, match=words.format(name)):
            rpc.rpc_sync("worker1", function, args=args)


def test_pickles_that_call_functions_are_refused_before_the_call(group, tmp_path):
    trace = tmp_path / "trace"
    for value, where in ((Evil(trace), "argument 0"), ([{"deep": (Evil(trace),)}], r"argument 0\[0\]\['deep'\]\[0\]")):
        with pytest.raises(rpc.SerializationError, match=rf"{where} \(Evil\).* class with its own __reduce__"):
            rpc.rpc_sync("worker1", echo, args=(value,))
    assert not trace.exists()


def test_code_and_script_modules_are_refused(group):
    for function, args, what in (
        (lambda: 1, (), "lambdas, nested functions and bound methods have no name there"),
        (echo, (lambda: 1,), "Lambdas and nested functions have none, and code is not sent"),
        (echo, (torch.jit.script(torch.nn.Linear(1, 1)),), "is code, which is not sent"),
    ):
        with pytest.raises(rpc.SerializationError, match=what):
            rpc.rpc_sync("worker1", function, args=args)
    refused(echo, script_triple, name=r"__torch__\..*script_triple")


def is_imported(module):
    return module in sys.modules


def test_a_refused_name_is_not_imported():
    sys.modules["this"] = fake = type(sys)("this")
    fake.function = type("function", (), {"__module__": "this"})
    try:
        with workers(2, allowed_functions=[is_imported]):
            refused(fake.function, name=r"this\.function")
            assert not rpc.rpc_sync("worker1", is_imported, args=("this",))
    finally:
        del sys.modules["this"]


def test_plain_data_passes_as_argument_and_result(group):
    values = [
        {1, 2},
        frozenset("ab"),
        1 + 2j,
        bytearray(b"x"),
        collections.OrderedDict(a=1),
        torch.float32,
        torch.Size([1, 2]),
        torch.device("cpu"),
        torch.strided,
        range(3),
        [None, True, "text", b"bytes", (1.5,)],
        2**100,
        rpc.get_worker_info("worker1"),
    ]
    for value in values:
        assert rpc.rpc_sync("worker1", echo, args=([value, object],))[0] == value
    assert torch.equal(rpc.rpc_sync("worker1", echo, args=({1: torch.ones(2), "x": {3}},))[1], torch.ones(2))
    values = rpc.rpc_sync("worker1", echo, args=([torch.nn.Parameter(torch.ones(2)), object],))
    assert isinstance(values[0], torch.nn.Parameter)


def test_types_are_refused_unless_listed(group):
    refused(echo, Color.RED, name=rf"{Color.__module__}\.Color")
    assert rpc.rpc_sync("worker1", echo, args=(Counter(5),)).value == 5


@pytest.mark.parametrize("member", [Size.SMALL, Access.WRITE, Access.READ | Access.WRITE])
def test_members_of_listed_enums_pass(group, member):
    assert rpc.rpc_sync("worker1", echo, args=(member,)) is member


def test_rrefs_and_their_methods_pass_for_listed_classes(group):
    counter = rpc.remote("worker1", Counter, args=(1,))
    assert counter.rpc_sync().add(2) == 3
    assert counter.remote().add(2).to_here() == 5
    assert rpc.rpc_sync("worker1", echo, args=([counter, {1}],))[0].to_here().value == 5
    with pytest.raises(RuntimeError, match=REFUSED.format(r".*Counter\._secret")):
        counter.rpc_sync()._secret()


def make_unlisted():
    return Unlisted()


def test_methods_of_objects_of_other_classes_are_refused():
    with workers(2, allowed_functions=[make_unlisted]):
        thing = rpc.remote("worker1", make_unlisted)
        with pytest.raises(RuntimeError, match=REFUSED.format(r".*Unlisted\.add")):
            thing.rpc_sync().add(1)


@dataclasses.dataclass
class Login:
    user: str
    is_admin: bool = dataclasses.field(init=False)

    def __post_init__(self):
        self.is_admin = False


def is_admin(login):
    return login.is_admin


def test_fields_that_are_not_for_the_constructor_arrive_as_they_were_sent():
    """So a listed class must handle any state in them, as docs/threat_model.md says."""
    login = Login("user")
    login.is_admin = True
    with workers(2, allowed_functions=[is_admin, Login]):
        assert rpc.rpc_sync("worker1", is_admin, args=(login,)) is True


def look_up(module, name):
    find_allowed(module, name)


@pytest.mark.parametrize("entry", ["torch.ops.aten.mul", "torch.ops.aten.mul.Tensor", "aten::mul"])
def test_an_object_of_torch_ops_is_allowed_as_the_operator_that_it_is(entry):
    with workers(2, allowed_functions=[entry, look_up]):
        for function in (torch.ops.aten.mul, torch.ops.aten.mul.Tensor, torch.mul):
            assert rpc.rpc_sync("worker1", function, args=(torch.ones(1), torch.full((1,), 2.0))).item() == 2
        with pytest.raises(RuntimeError, match="does not let others run aten::empty"):
            rpc.rpc_sync("worker1", torch.ops.aten.empty, args=([2],))


def test_an_object_of_torch_ops_cannot_be_called_as_a_python_function():
    """Python would not check its arguments: a wrong dtype ends the process."""
    with workers(2, allowed_functions=["torch.ops.aten.empty", look_up]):
        with pytest.raises(rpc.NotAllowedError, match=r"torch\.ops\.aten\.empty only in a call of an operator"):
            rpc.rpc_sync("worker1", look_up, args=("torch.ops", "aten.empty"))
        assert rpc.rpc_sync("worker1", torch.ops.aten.empty, args=([2],)).shape == (2,)


def call_method(rref, name, *args):
    """Calls a method of which a proxy has an attribute of its own."""
    return rpc.rpc_sync(rref.owner(), rref_proxy._call_method, args=(rref, name, args, {}))


def make_hidden():
    return _Hidden()


def _private():
    return "private"


@pytest.mark.parametrize("prefix", ["*", "Counter*", "Counter.*"])
def test_a_prefix_opens_no_names_with_an_underscore(prefix):
    here = double.__module__
    with workers(2, allowed_functions=[f"{here}.{prefix}", Counter, make_hidden, look_up]):
        counter = rpc.remote("worker1", Counter, args=(5,))
        attributes = (("__getattribute__", "value"), ("__setattr__", "value", 1), ("__init__", 7), ("__sizeof__",))
        for method, *args in (*attributes, ("_secret",), ("__reduce_ex__", 4), ("__class__",)):
            with pytest.raises(NotAllowedError, match=REFUSED.format(rf".*Counter\.{method}")) as failure:
                call_method(counter, method, *args)
            assert method == "_secret" or "[..." not in str(failure.value)
        assert counter.rpc_sync().add(1) == 6
        hidden = rpc.remote("worker1", make_hidden)
        with pytest.raises(NotAllowedError):
            hidden.rpc_sync().add(1)
        for name in ("_private", "_Hidden", "_Hidden.add", "Counter.__init__", "Counter._secret"):
            refused(look_up, here, name, name=rf"{here}\.{name}")
    with workers(2, allowed_functions=[Counter, f"{here}.Counter._secret", f"{here}.Counter.__sizeof__"]):
        counter = rpc.remote("worker1", Counter)
        assert counter.rpc_sync()._secret() == "secret" and call_method(counter, "__sizeof__") > 0


def test_a_proxy_runs_no_property(group):
    counter = rpc.remote("worker1", Counter)
    with pytest.raises(NotAllowedError, match=REFUSED.format(r".*Counter\.adder")):
        counter.rpc_sync().adder(1)


def test_a_prefix_allows_names_that_a_package_defines_but_not_its_imports():
    here = double.__module__
    with workers(2, allowed_functions=[f"{here}.*", "aten::*"]):
        assert rpc.rpc_sync("worker1", triple, args=(2,)) == 6
        assert rpc.rpc_sync("worker1", torch.mul, args=(torch.ones(1), torch.full((1,), 2.0))).item() == 2
        rpc.rpc_sync("worker1", look_up, args=(here, "double"))
        for name in ("os.system", "double.__globals__"):
            refused(look_up, here, name, name=rf"{here}\.{name}")


def test_builtin_exceptions_keep_their_type_and_others_become_remote_exceptions(group):
    with pytest.raises(TypeError, match="unsupported operand"):
        rpc.rpc_sync("worker1", double, args=(None,))
    with pytest.raises(rpc.RemoteException, match="mine"):
        rpc.rpc_sync("worker1", raises_own_error)


def test_exceptions_keep_their_arguments_and_attributes(group):
    with pytest.raises(FileNotFoundError) as raised:
        rpc.rpc_sync("worker1", raises_os_error)
    error = raised.value
    assert (error.errno, error.filename, error.more) == (2, "file", {"set": {1}})


def test_the_types_of_causes_and_members_follow_the_same_rules(group):
    """worker1 rebuilds what worker0 raises, and says which types it got."""
    types = rpc.rpc_sync("worker1", catch_from, args=("worker0", "raises_linked_errors"))
    assert types == ["ValueError", "KeyError", "RemoteException", "RemoteException"]
    if sys.version_info >= (3, 11):
        types = rpc.rpc_sync("worker1", catch_from, args=("worker0", "raises_group"))
        assert types == ["ExceptionGroup", "KeyError", "RemoteException"]
    assert not Reduced.calls


def test_links_are_plain_data(group):
    assert rpc.rpc_sync("worker1", rebuild_with_evil_links) == "RemoteException"


def test_torchrpcs_exceptions_keep_their_type(group):
    with pytest.raises(NotAllowedError, match=REFUSED.format(r".*\.triple")) as failure:
        rpc.rpc_sync("worker1", triple, args=(1,))
    assert "original exception type" not in str(failure.value)
    with pytest.raises(rpc.WorkerLostError, match="gone") as failure:
        rpc.rpc_sync("worker1", loses_a_worker)
    assert failure.value.worker == "worker2"


def test_internal_functions_of_a_group_need_no_listing(group):
    weight = rpc.remote("worker1", torch.add, args=(torch.ones(2), 0))
    module = RemoteModule("worker1", torch.nn.Linear, args=(2, 1))
    with dist_autograd.context() as context:
        loss = module(torch.ones(1, 2)).sum()
        dist_autograd.backward(context, [loss])
        DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1).step(context)
    assert weight.to_here().tolist() == [1.0, 1.0]
    assert weight._get_type() is torch.Tensor
    with torch.profiler.profile() as profile:
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
    assert profile.events()


@pytest.mark.parametrize(
    ("entries", "error", "words"),
    [
        ("package.function", TypeError, "must be a list"),
        ([5], TypeError, "neither a function nor the name"),
        ([lambda: 1], ValueError, "no name of its own"),
    ],
)
def test_entries_that_name_no_function_are_refused(entries, error, words):
    with pytest.raises(error, match=words):
        rpc.TensorPipeRpcBackendOptions(allowed_functions=entries)


def test_an_entry_that_would_allow_everything_is_refused(tmp_path):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store", allowed_functions=["*"])
    with pytest.raises(RuntimeError, match="would allow everything"):
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)


@pytest.mark.parametrize(
    "entry",
    [
        *(
            "torchrpc.rpc._values.pickler._function",
            "torchrpc.rpc._values.pickler._fill_function",
            "torchrpc.rpc.internal.deserialize",
        ),
        *(
            "torchrpc.*",
            "torchrpc.rpc.*",
            "torch*",
            "torch.*",
            "builtins.*",
            "b*",
            "torch.distributed.rpc.internal.deserialize",
        ),
        *("builtins.eval", "builtins.exec", "marshal.loads", "pickle.loads", "_pickle.loads", "types.FunctionType"),
        *("importlib.import_module", "operator.attrgetter", "_operator.attrgetter", f"{__name__}.builtins.eval"),
        *("torch.storage._load_from_bytes", "torch.storage.*", "torch.serialization.*", "torch.load", "torch.utils.*"),
        *("timeit.timeit", "timeit.*", "os.*", "os.system", "posix.system", "pdb.*", "pdb.run", "subprocess.run"),
        *(f"{__name__}.subprocess.run", f"{__name__}.os.system", "json.*", "collections.*", "numpy.*", "n*"),
        *("numpy._core.numeric._frombuffer", "numpy.frombuffer", "numpy.dtype", "numpy.ndarray", "numpy.load"),
        *("torch._utils._rebuild_tensor_v2", "collections._tuplegetter", "torch.nn.functional._canonical_mask"),
    ],
)
def test_an_entry_that_allows_everything_is_refused(entry):
    with pytest.raises(ValueError, match="would let callers run") as raised:
        resolve([entry])
    assert repr(entry) in str(raised.value)


@pytest.mark.parametrize("entry", ["os.sytem", "double", ".double", "torch.nn.Lineer.forward"])
def test_an_entry_that_can_never_match_is_refused(entry):
    with pytest.raises(ValueError, match="which can never match"):
        resolve([entry])


def test_an_entry_with_another_name_matches_what_it_names():
    assert resolve(["os.getpid"]) == ["os.getpid", "posix.getpid"]
    assert resolve(["operator.add"]) == ["operator.add", "_operator.add"]
    assert resolve(["torch.add"]) == ["torch.add", "aten::add"]
    assert resolve(["torch.manual_seed"]) == ["torch.manual_seed", "torch.random.manual_seed"]
    assert resolve(["torchrpc.rpc.rpc_sync"]) == ["torchrpc.rpc.rpc_sync", "torchrpc.rpc.api.rpc_sync"]
    unchanged = [
        "cpp_function(f)",
        "package.*",
        "no_such_package.module.f",
        "__main__.later",
        "collections.Counter",
        "torch.nn.*",
    ]
    assert resolve(unchanged) == unchanged
    assert resolve(["math.*"])[0] == "math.*" and "aten::sqrt" in resolve(["math.*"])  # the operator of math.sqrt


def test_init_rpc_refuses_and_resolves(tmp_path):
    def options(*entries):
        return rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store", allowed_functions=entries)

    with pytest.raises(ValueError, match="would let callers run any code"):
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options("builtins.eval"))
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options("os.getenv", "os.path.join"))
    try:
        assert rpc.rpc_sync("worker0", os.path.join, args=("a", "b")) == "a/b"  # it is posixpath.join
        with pytest.raises(NotAllowedError, match=r"cannot have it: it would let callers run any code") as raised:
            rpc.rpc_sync("worker0", eval, args=("1",))
        assert "allowed_functions=[..." not in str(raised.value)
    finally:
        rpc.shutdown()


def test_a_function_that_torch_has_written_in_python_can_be_listed():
    with workers(2, allowed_functions=["torch.manual_seed", "torch.initial_seed", torch.einsum]):
        rpc.remote("worker1", torch.random.manual_seed, args=(7,))._get_future().wait()
        assert rpc.rpc_sync("worker1", torch.initial_seed) == 7
        assert rpc.rpc_sync("worker1", torch.einsum, args=("i->", torch.ones(3))).item() == 3


def test_refusals_suggest_no_names_of_other_packages(group):
    for value in (subprocess.run, pytest.raises, ipaddress.ip_address("::1"), types.SimpleNamespace(a=1), os.environ):
        with pytest.raises((NotAllowedError, rpc.SerializationError)) as failure:
            rpc.rpc_sync("worker1", echo, args=(value,))
        assert "[..." not in str(failure.value).split("Traceback")[0]
    with pytest.raises(NotAllowedError) as refusal:
        rpc.rpc_sync("worker1", torch.mul, args=(torch.ones(1), 1))
    assert "among them" not in str(refusal.value)
    with pytest.raises(NotAllowedError, match=r"allowed_functions=\[\.\.\., '.*triple'\]"):
        rpc.rpc_sync("worker1", triple, args=(1,))
