"""The stubs are right: the extension's compared with its binary, the package's with the names that it loads."""

import ast
import contextlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import torchrpc
from torchrpc import _C, rpc

pytestmark = pytest.mark.lint

STUBS = Path(importlib.util.find_spec("torchrpc").origin).parent


def stub_functions(body):
    """Return {name: list of parameter lists} of a stub's functions, properties and variables (None for the latter)."""
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
                found[node.name] = None
                continue
            names = [a.arg for a in node.args.posonlyargs + node.args.args]
            static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
            names += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
            names += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
            found.setdefault(node.name, []).append(names[1:] if names[:1] == ["self"] and not static else names)
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = None
    return found


def split_parameters(text):
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += char in "([{"
        depth -= char in ")]}"
        if char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip().split(":")[0].split("=")[0].strip() for part in [*parts, text[start:]] if part.strip()]


def binary_signatures(function):
    """Return the parameter lists of an extension's function: one, or several for overloads."""
    with contextlib.suppress(ValueError):
        parameters = inspect.signature(function).parameters.values()
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        return [[stars.get(each.kind, "") + each.name for each in parameters if each.name != "self"]]
    name = function.__name__
    lines = re.findall(rf"^(?:\d+\. )?{re.escape(name)}\((.*)\) -> ", function.__doc__ or "", re.M)
    return [
        [p for p in split_parameters(line) if p not in ("self", "/")] for line in lines if line != "*args, **kwargs"
    ]


@pytest.fixture(scope="module")
def stub():
    tree = ast.parse((STUBS / "_C.pyi").read_text())
    return tree.body, {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def public(names):
    return {n for n in names if not (n.startswith("__") or n.startswith("_pybind11") or n in ("_T", "_Raises"))}


def test_the_extensions_stub_has_its_names(stub):
    body, classes = stub
    assert set(stub_functions(body)) | set(classes) == public(dir(_C))


def test_the_extensions_functions_have_the_stubs_parameters(stub):
    body, _ = stub
    for name, parameters in stub_functions(body).items():
        if parameters is not None:
            assert parameters == binary_signatures(getattr(_C, name)), name


def test_the_extensions_classes_have_the_stubs_members(stub):
    _, classes = stub
    for class_name, node in classes.items():
        members, there = stub_functions(node.body), vars(getattr(_C, class_name))
        assert public(members) == public(there), class_name
        for name in set(members) & set(there):
            if members[name] is None:
                assert isinstance(there[name], property), f"{class_name}.{name}"
            else:
                function = getattr(_C, class_name).__dict__[name]
                function = function.__func__ if isinstance(function, staticmethod) else function
                assert members[name] == binary_signatures(function), f"{class_name}.{name}"
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        assert bases <= {base.__name__ for base in getattr(_C, class_name).__mro__}


def test_the_packages_stub_has_the_names_that_it_loads():
    tree = ast.parse((STUBS / "rpc" / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    named = {alias.asname for node in imports for alias in node.names if alias.asname}
    assert named | {"Backend", "BackendType", "is_available"} == set(dir(rpc))


def test_every_public_name_exists_and_is_documented():
    for name in dir(rpc):
        assert hasattr(rpc, name), name
    assert set(rpc.__all__) == {name for name in dir(rpc) if not name.startswith("_")}
    for name in ("rpc_sync", "rpc_async", "remote", "shutdown", "init_rpc", "get_worker_info", "RRef", "is_available"):
        assert getattr(rpc, name).__doc__
    for name in public(dir(_C.PyRRef)):
        if not name.startswith("_"):
            assert getattr(_C.PyRRef, name).__doc__.strip(), name


NOT_MADE_BY_USERS = {"RankError", "RpcAgent", "TensorPipeAgent", "DistAutogradContext", "RemoteProfilerManager"}


def public_callables():
    modules = [torchrpc, rpc, *(getattr(torchrpc, name) for name in ("autograd", "nn", "optim", "profiler"))]
    for module in modules:
        for name in dir(module):
            value = getattr(module, name)
            is_public = not name.startswith("_") and name not in NOT_MADE_BY_USERS
            if is_public and callable(value) and getattr(value, "__module__", "").startswith("torchrpc"):
                yield pytest.param(value, id=f"{module.__name__}.{name}")
    for cls in (rpc.PyRRef, rpc.RRef, rpc.WorkerInfo, rpc.TensorPipeRpcBackendOptions):
        for name, value in inspect.getmembers(cls, callable):
            if not name.startswith("_"):
                yield pytest.param(value, id=f"{cls.__name__}.{name}")


@pytest.mark.parametrize("value", list(public_callables()))
def test_every_public_function_has_a_signature_and_a_docstring(value):
    assert inspect.getdoc(value)
    assert inspect.signature(value)


def test_signatures_of_the_extension_are_those_that_help_shows():
    assert str(inspect.signature(rpc.RRef.to_here)) == "(self, timeout=-1.0)"
    assert str(inspect.signature(rpc.RRef)) == "(value, type_hint=None)"
    assert str(inspect.signature(rpc.WorkerInfo)) == "(name, id)"
    assert rpc.RRef.to_here.__doc__.startswith("A copy of the value")


def test_dir_lists_what_is_there():
    assert set(dir(torchrpc)) == set(torchrpc.__all__)
    for name in torchrpc.__all__:
        assert getattr(torchrpc, name) is not None


def test_the_package_knows_its_version_and_is_typed():
    assert re.match(r"\d+", torchrpc.__version__)
    assert (STUBS / "py.typed").exists()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = torchrpc.nothing
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rpc.nothing
