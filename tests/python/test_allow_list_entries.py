"""Which entries of `allowed_functions` `init_rpc` accepts, and which entries errors advise to add."""

import dataclasses  # noqa: F401  a test names it, as an attribute of this module
import functools
import importlib.util
import math
import operator
import os
import os.path as path_module  # noqa: F401
import sys
import threading
import typing  # noqa: F401
from os import getpid

import numpy as np
import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc.rpc import NotAllowedError
from torchrpc.rpc._security.allow_list import find_listed, resolve
from torchrpc.testing import workers

HERE = __name__
REGISTRY = {"key": 1}


def echo(value):
    return value


def _private():
    return "private"


@functools.cache
def cached():
    return "cached"


class Account:
    owner = dict
    start = staticmethod(threading._start_new_thread)

    def get(self):
        return 1

    @staticmethod
    def fixed():
        return 2

    @property
    def balance(self):
        return 3

    def _withdraw(self):
        return 4


class Array(np.ndarray):
    pass


class Text(str):
    pass


class Net(torch.nn.Module):
    pass


start = threading._start_new_thread
lock = threading.Lock
shared = Account()

UNSAFE = """
    asyncio.create_subprocess_shell asyncio.create_subprocess_exec asyncio.subprocess.create_subprocess_exec asyncio.run
    asyncio.* asyncio.subprocess.* _asyncio.Task unittest.mock.patch webbrowser.open
    typing.get_type_hints typing.ForwardRef string.Formatter string.Formatter.format builtins.str.format
    builtins.str.format_map builtins.open io.open _io.open io.FileIO os.open
    sympy.sympify sympy.parse_expr sympy.* sympy.parsing.sympy_parser.parse_expr sympy.sin
    torch.compile torch.compiler.compile torch._inductor.compile torch._inductor.* torch._dynamo.optimize
    torch._dynamo.* torch.fx.GraphModule torch.fx.symbolic_trace torch.fx.* torch.jit.CompilationUnit torch.jit.save
    torch.Tensor.set_ torch.nn.Module.compile torch.nn.modules.module.Module.compile torch.FloatStorage
    torch.FloatStorage.from_file torch.UntypedStorage.from_file torch.distributed.run.main
    torch.nn.attention.flex_attention.*
    numpy.rec.fromfile numpy.rec.array numpy.recarray numpy.fromfile numpy.load numpy.memmap numpy.savetxt
    numpy.genfromtxt numpy.ndarray.tofile numpy.ndarray.* numpy.matrix
"""
PRIVATE = """
    _imp.create_dynamic _thread.start_new_thread _thread.interrupt_main _sitebuiltins.Quitter _collections_abc.Callable
    builtins.__loader__.load_module collections._tuplegetter collections.Counter.__init__
    torch.nn.functional._canonical_mask torch.utils._pytree.tree_map
"""
OPERATORS = """
    aten::from_file aten::from_file.out aten::save aten::load aten::set_ aten::set_.source_Storage aten::set_data
    aten::_nested_view_from_buffer aten::_sparse_coo_tensor_unsafe prim::* prim::rpc_sync inductor::*
    inductor::_alloc_from_pool profiler::* profiler::_record_function_enter_new c10d::* c10d::send debugprims::*
    debugprims::load_tensor mkldnn::data_ptr symm_mem::* _test::* aten* prof* torch.ops.aten.from_file
    torch.ops.aten.from_file.default torch.ops.inductor.resize_storage_bytes_
"""
OWN = """
    os.system os.path.os.system typing.get_type_hints start lock Account.start Array.tofile Text.format Net.compile
"""


@pytest.mark.parametrize(
    "entry", [*(UNSAFE + PRIVATE + OPERATORS).split(), *(f"{HERE}.{name}" for name in OWN.split())]
)
def test_an_entry_that_would_allow_too_much_is_refused(entry):
    with pytest.raises(ValueError, match=r"would let callers (run|reach)") as raised:
        resolve([entry])
    assert repr(entry) in str(raised.value)


@pytest.mark.parametrize("entry", ["_xxsubinterpreters.run_string", "_interpreters.exec", "_testcapi.*", "_test*"])
def test_a_private_module_of_python_is_refused_also_if_python_does_not_list_it(entry):
    if entry != "_test*" and importlib.util.find_spec(entry.partition(".")[0]) is None:
        pytest.skip(f"this Python has no {entry}")
    with pytest.raises(ValueError, match="would let callers run"):
        resolve([entry])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("echo.__globals__", "it is a dict, and neither a function nor a method nor a class"),
        ("echo.__code__", "it is a code"),
        ("echo.__call__", "neither a function nor"),
        ("echo.__globals__.get", "goes through __globals__"),
        ("__loader__.get_code", "goes through __loader__"),
        ("Account.__class__", "it is a type"),
        ("Account.__dict__", "it is a mappingproxy"),
        ("Account.__init__.__globals__", "goes through __init__"),
        ("Account.balance", "it is a property"),
        ("REGISTRY", "it is a dict"),
        ("os", "it is a module"),
        ("os.path", "it is a module"),
        ("HERE", "it is a str"),
    ],
)
def test_an_entry_names_a_function_a_method_or_a_class(name, words):
    with pytest.raises(ValueError, match=words):
        resolve([f"{HERE}.{name}"])


@pytest.mark.parametrize(
    "entry",
    [
        *(f"{HERE}.{name}" for name in ("echo", "_private", "cached", "Account", "Account.get", "Account._withdraw")),
        *(f"{HERE}.{name}" for name in ("Account.__init__", "Account.__sizeof__", "Account.owner", "shared.get")),
        *(f"{HERE}.*", f"{HERE}.Account.*", f"{HERE}.getpid", f"{HERE}.Array", f"{HERE}.Text", f"{HERE}.Text.upper"),
        *(f"{HERE}.Net", f"{HERE}.Net.state_dict", "sympylike.*", "torch.nn.*", "torch.optim.*", "math.*"),
        *("functools.reduce", "operator.add", "_operator.add", "collections.deque", "threading.Lock", "os.getpid"),
        *("torch.Generator", "torch._C.Generator", "torch.vmap", "torch.nn.Module", "torch.Tensor.add", "torch.add"),
        *("numpy.add", "numpy.sum", "numpy.float32", "aten::add", "aten::empty", "aten::__and__", "mylib::*"),
        *("prims::add", "image::decode", "torch.ops.aten.add", "__torch__.*", "cpp_function(f)", "__main__.later"),
    ],
)
def test_other_entries_are_accepted(entry):
    assert entry in resolve([entry])


def test_functions_and_classes_are_accepted_as_objects():
    entries = [operator.add, functools.reduce, torch.Generator, os.getpid, torch.add, Account, Account.get, len]
    options = rpc.TensorPipeRpcBackendOptions(allowed_functions=entries)
    names = resolve(options.allowed_functions)
    assert {"_operator.add", "torch._C.Generator", "posix.getpid", "aten::add", f"{HERE}.Account.get"} <= set(names)


@pytest.mark.parametrize("entry", [torch.ops.aten.mul, torch.ops.aten.mul.Tensor], ids=["packet", "overload"])
def test_objects_of_torch_ops_are_operators(entry):
    assert resolve(rpc.TensorPipeRpcBackendOptions(allowed_functions=[entry]).allowed_functions) == ["aten::mul"]


# --- Prefixes of torch's operators ---


@pytest.mark.parametrize(
    ("prefix", "has", "has_not"),
    [
        (
            "aten::*",
            "add mul relu_ linalg_solve to",
            "from_file save set_ set_data empty resize_ warn _unsafe_view __and__",
        ),
        ("aten::fro*", "frobenius_norm", "from_file add"),
        ("quantized::*", "add linear", "load"),
        ("prims::*", "add mul", "empty"),
    ],
)
def test_a_prefix_of_operators_stands_for_those_that_reach_no_files_and_no_other_memory(prefix, has, has_not):
    space = prefix.partition("::")[0]
    names = resolve([prefix])
    assert {f"{space}::{name}" for name in has.split()} <= set(names)
    assert not {f"{space}::{name}" for name in has_not.split()} & set(names)
    assert prefix not in names and resolve(names) == names


def test_a_prefix_of_math_covers_the_functions_that_calls_name_as_operators():
    with workers(2, allowed_functions=["math.*"]):
        for function in (math.sqrt, math.factorial, math.hypot):
            args = (4,) if function is not math.hypot else (3, 4)
            assert rpc.rpc_sync("worker1", function, args=args) == function(*args)
        with pytest.raises(NotAllowedError):
            rpc.rpc_sync("worker1", torch.add, args=(1, 2))


def test_a_prefix_covers_no_operator_that_takes_a_path():
    words = ("file", "path", "uri", "pointer", "ptr")
    by_schema = {schema.name: schema for schema in torch._C._jit_get_all_schemas()}
    for prefix in ("aten::*", "quantized::*", "prims::*"):
        for name in resolve([prefix]):
            arguments = [each.name for each in by_schema[name].arguments]
            assert not [each for each in arguments if any(word in each for word in words)], (name, arguments)


def test_a_prefix_of_no_operators_is_refused():
    for entry in ("aten::_*", "aten::from_f*", "aten::no_such_operator*"):
        with pytest.raises(ValueError, match="which can never match"):
            resolve([entry])


def test_operators_under_a_prefix_run_and_read_no_files(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("password")
    with workers(2, allowed_functions=["aten::*"]):
        assert rpc.rpc_sync("worker1", torch.add, args=(1, 2)) == 3
        options = {"shared": False, "size": 8, "dtype": torch.uint8}
        with pytest.raises(NotAllowedError, match="aten::from_file"):
            rpc.rpc_sync("worker1", torch.from_file, args=(str(secret),), kwargs=options)


def test_options_keep_their_entries_and_can_be_used_again(tmp_path):
    entries = ["aten::*", "os.getpid", "torch.func.grad", "threading.Lock", f"{HERE}.Net.state_dict"]
    options = rpc.TensorPipeRpcBackendOptions(allowed_functions=entries)
    for number in range(2):
        options.init_method = f"file://{tmp_path}/store{number}"
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
        try:
            assert options.allowed_functions == entries
            assert rpc.rpc_sync("worker0", getpid) == os.getpid()
        finally:
            rpc.shutdown()


# --- Advice ---


class Nothing:
    """Stands for the list of a worker that allows nothing."""

    worker, callers, is_for_member = "worker0", "*", True

    def entry_for(self, name):
        return ""


def refusal(name, module=HERE):
    with pytest.raises(NotAllowedError, match="its allowed_functions do not have it") as raised:
        find_listed(module, name, Nothing())
    return str(raised.value)


@pytest.mark.parametrize(
    "name", ["echo", "_private", "cached", "Account", "Account.get", "Account.fixed", "Net", "Nothing"]
)
def test_an_error_advises_to_add_a_name_of_the_program(name):
    assert f"[..., '{HERE}.{name}']" in refusal(name)
    assert resolve([f"{HERE}.{name}"])


@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "os", "os.getpid", "getpid", "typing.get_type_hints", "dataclasses.make_dataclass", "typing"),
        *("path_module.join", "np.load", "torch.add", "rpc.rpc_sync", "resolve", "start", "lock", "REGISTRY", "shared"),
        *("shared.get", "REGISTRY.get", "Account.owner", "Account.start", "Account.balance", "Account.nothing"),
        *("Account.__init__", "Account.get.__globals__", "echo.__globals__", "Text.format", "Net.compile", "nothing"),
    ],
)
def test_an_error_advises_no_name_that_leads_out_of_the_program(name):
    assert "[..." not in refusal(name)


def test_an_error_advises_no_name_of_a_module_that_is_not_loaded():
    assert "[..." not in refusal("function", f"{HERE}.not_loaded")
    assert "[..." not in refusal("function", "not_loaded")


def test_no_properties_run_for_an_advice(monkeypatch):
    class Lazy(type(os)):
        def __getattr__(self, name):
            raise AssertionError(f"looked up {name}")

    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    assert "[..." not in refusal("function", "lazy_module")
