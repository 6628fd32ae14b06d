"""The allow-list of a worker that was started with `allowed_functions`: which functions its callers may run there, and
which objects it unpickles.

The extension checks operators, script functions and C++ functions (csrc/node/allow_list.h) and calls these functions
for Python objects, on any thread. A refused name is not looked up, so nothing is imported for it.
"""

import builtins
import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from torchrpc import _C

from ._cpp_functions import CppFunction
from ._errors import NotAllowedError
from ._names import find_global

logger = logging.getLogger(__name__)

# Functions and classes that the package itself sends: to join and leave a group, for RRefs, profiles, optimizers and
# remote modules. A user's function travels as an argument of these and is itself checked against the list.
_INTERNAL = """
    rpc.internal.PythonUDF rpc.rref_proxy._call_method
    rpc.api._gather_to_leader rpc.api._broadcast_to_followers rpc.api._rref_typeof_on_owner
    rpc._utils._update_group_membership
    rpc._pickler._rref rpc._pickler._untyped_storage rpc._pickler._per_channel _C.WorkerInfo
    optim._parts._make optim._parts._step optim._parts._state optim._parts._load
    nn.remote_module._create_module nn.remote_module._run_forward nn.remote_module._parameter_rrefs
    nn.remote_module._set_training
    profiler._start profiler._stop profiler._clock
"""
# The package's own exceptions.
_ERRORS = """
    rpc.RpcError rpc.RpcTimeoutError rpc.WorkerLostError rpc.NotAllowedError rpc.NameNotFoundError rpc.RendezvousError
    rpc.ShutdownError rpc.SerializationError
"""
# Types of plain data: to build one calls nothing that arrives with it.
_DATA = """
    builtins.bool builtins.bytearray builtins.bytes builtins.complex builtins.dict builtins.float builtins.frozenset
    builtins.int builtins.list builtins.object builtins.range builtins.set builtins.slice builtins.str builtins.tuple
    collections.OrderedDict collections.deque
    datetime.date datetime.datetime datetime.time datetime.timedelta datetime.timezone
    decimal.Decimal fractions.Fraction uuid.UUID
    torch.Size torch.device torch._utils._rebuild_parameter torch.nn.parameter.Parameter torch.Tensor
    torch.serialization._get_layout
"""
# To allow one of these is to allow everything: it runs, loads or looks up whatever arrives with the call.
_RUNS_ANYTHING = """
    builtins.eval builtins.exec builtins.compile builtins.__import__ builtins.getattr builtins.setattr builtins.globals
    builtins.vars builtins.__build_class__ importlib.import_module importlib.__import__ marshal.load marshal.loads
    pickle.load pickle.loads pickle.Unpickler pickle._load pickle._loads pickle._Unpickler operator.attrgetter
    operator.methodcaller types.FunctionType types.CodeType types.MethodType code.InteractiveInterpreter
    runpy.run_module runpy.run_path torch.utils.cpp_extension.load torch.utils.cpp_extension.load_inline torch.hub.load
"""
# The package's functions that may be listed; others are its pickler, its checks and their parts.
_LISTABLE = frozenset(f"torchrpc.rpc.api.{name}" for name in ("rpc_sync", "rpc_async", "remote", "get_worker_info"))
_ALWAYS = frozenset([*(f"torchrpc.{name}" for name in (_INTERNAL + _ERRORS).split()), *_DATA.split()])


def names_of(entries: Iterable[Callable[..., Any] | str]) -> list[str]:
    """Return the entries of `allowed_functions` as the names by which calls refer to them.

    Raises:
        TypeError: an entry is neither a callable nor a str.
        ValueError: a function has no name of its own at the top level of a module.
    """
    if isinstance(entries, str):
        raise TypeError(f"allowed_functions must be a list of functions and names, but is the str {entries!r}.")
    return [_name_of(entry) for entry in entries]


def _name_of(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, CppFunction):
        return f"cpp_function({entry.name})"
    if isinstance(entry, torch.jit.ScriptFunction):
        return entry.qualified_name
    if not callable(entry):
        raise TypeError(f"allowed_functions has {entry!r}, which is neither a function nor the name of one.")
    if (operator := _find_builtin(entry)) is not None:
        return operator
    module, name = getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)
    if not module or not name or "<" in name:
        raise ValueError(
            f"allowed_functions has {entry!r}, which has no name of its own at the top level of a module: such "
            "functions travel as code and cannot be allowed one by one."
        )
    return _full_name(module, name)


def resolve(entries: Iterable[str]) -> list[str]:
    """Return the entries, with the names by which calls refer to the objects of those that have another name.

    Called by `init_rpc`, since it imports the modules of the entries. For example, `os.system` is `posix.system` in
    calls, and `torch.add` is the operator `aten::add`.

    Raises:
        ValueError: an entry allows everything, or names nothing, so that it could never match.
    """
    names: dict[str, None] = {}
    for entry in entries:
        names[entry] = None
        if entry in ("", "*"):
            continue  # the core refuses them
        _refuse_if_unsafe(entry)
        if "::" in entry or "(" in entry or entry.endswith("*") or entry.startswith("__torch__."):
            continue  # operators, C++ functions, prefixes and script functions are names, not objects
        found = _find_entry(entry)
        _refuse_if_unsafe(entry)  # again, since its module is loaded now
        if callable(found):
            with contextlib.suppress(ValueError):  # it has no name of its own
                names[_name_of(found)] = None
    return list(names)


def _refuse_if_unsafe(entry: str) -> None:
    if why := _why_unsafe(entry):
        raise ValueError(f"allowed_functions has {entry!r}, which {why}")


def _find_entry(entry: str) -> Any:
    """Return the object that an entry names; None if this process cannot import its module."""
    parts = entry.split(".")
    if len(parts) < 2 or not all(parts):
        raise ValueError(
            f"allowed_functions has {entry!r}, which can never match: write the name with its module, as in "
            "'package.module.function', or 'aten::add' for a torch operator."
        )
    if parts[0] in ("__main__", "__mp_main__"):
        return None  # the script may define it later
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        try:
            found = sys.modules.get(module) or importlib.import_module(module)
        except ModuleNotFoundError as exc:
            if count > 1 and exc.name and module.startswith(exc.name):
                continue  # the rest may be a class and its method
            logger.warning("allowed_functions has %r, but this process has no module %s.", entry, module)
            return None
        except ImportError as exc:
            logger.warning("allowed_functions has %r, but its module %s cannot be imported: %s", entry, module, exc)
            return None
        try:
            return functools.reduce(getattr, parts[count:], found)
        except AttributeError as exc:
            raise ValueError(f"allowed_functions has {entry!r}, which can never match: {exc}.") from None
    return None


def _why_unsafe(entry: str) -> str:
    """Return why the entry may not be listed, as the end of a sentence; an empty string if it may."""
    prefix = entry.removesuffix("*") if entry.endswith("*") else None
    module = entry.removesuffix("*").removesuffix(".") + "."
    for package in ("torchrpc.", "torch.distributed.rpc.", "torch.distributed.autograd.", "cloudpickle."):
        if module.startswith(package) or (prefix is not None and package.startswith(prefix)):
            if prefix is None and _canonical_name(entry) in _LISTABLE:
                return ""
            return (
                f"would let callers run parts of {package[:-1]} itself, such as its pickler, by which they can run any "
                "code: list your own functions. What the package needs for itself is always allowed."
            )
    for name in _RUNS_ANYTHING.split():
        if entry == name or (prefix is not None and name.startswith(prefix)) or _is_same_object(entry, name):
            return (
                f"would let callers run any code, by {name}: list the functions that they need instead. (Without "
                "allowed_functions, everything is allowed.)"
            )
    return ""


def _find_loaded(name: str) -> Any:
    """Return the object of that name if its module is loaded; else None."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if module := sys.modules.get(".".join(parts[:count])):
            with contextlib.suppress(AttributeError):
                return functools.reduce(getattr, parts[count:], module)
    return None


def _canonical_name(name: str) -> str:
    found = _find_loaded(name)
    return _full_name(getattr(found, "__module__", "") or "", getattr(found, "__qualname__", "") or "")


def _is_same_object(entry: str, name: str) -> bool:
    found = _find_loaded(entry)
    return found is not None and found is _find_loaded(name)


def _full_name(module: str, name: str) -> str:
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"


def _refused(name: str) -> NotAllowedError:
    worker = _C._get_current_rpc_agent().get_worker_info().name
    start = f"{worker} does not let others run or send {name}: its allowed_functions do not have it"
    if why := _why_unsafe(name):
        return NotAllowedError(f"{start}, and cannot have it: it {why}", worker)
    return NotAllowedError(
        f"{start}. If they may, start {worker} with TensorPipeRpcBackendOptions(allowed_functions=[..., {name!r}]).",
        worker,
    )


def refused_code(what: str) -> NotAllowedError:
    """The error for something that travels as code: it has no name that could be listed."""
    worker = _C._get_current_rpc_agent().get_worker_info().name
    return NotAllowedError(
        f"{worker} does not let others send {what}, because its allowed_functions can allow only what has a name. "
        f"Define a function at the top level of a module that {worker} can import, and list that function.",
        worker,
    )


def find_allowed(module: str, qualified_name: str) -> Any:
    """`find_global`, for names that the list allows.

    Raises:
        NotAllowedError: the list does not allow the name; nothing has been imported.
    """
    name = _full_name(module, qualified_name)
    if name in _ALWAYS or _is_torch_constant(module, qualified_name):
        return find_global(module, qualified_name)
    if not (entry := _C._allowed_by(name)):
        raise _refused(name)
    found = find_global(module, qualified_name)
    # "package.*" allows the objects that the package defines, not those that it has imported from elsewhere.
    if entry != name and _full_name(getattr(found, "__module__", ""), getattr(found, "__qualname__", "")) != name:
        raise _refused(name)
    return found


def check_allowed(name: str) -> None:
    """Raise NotAllowedError unless an entry allows this name of something that is no Python object."""
    if not _C._allowed_by(name):
        raise _refused(name)


def _is_torch_constant(module: str, name: str) -> bool:
    """Whether it is a dtype, layout or memory format."""
    kinds = torch.dtype, torch.layout, torch.memory_format
    return module == "torch" and isinstance(vars(torch).get(name), kinds)


def find_exception(module: str, qualified_name: str) -> Any:
    """Return the type of an exception that a callee has raised: any of Python's own, or one that the list allows."""
    if _C._allowed_by("") is None:
        return find_global(module, qualified_name)
    found = vars(builtins).get(qualified_name) if module == "builtins" else None
    return found if isinstance(found, type) and issubclass(found, Exception) else find_allowed(module, qualified_name)


def check_method(value: Any, name: str) -> None:
    """Raise NotAllowedError if other workers may not call this method of an object that an RRef refers to.

    A method is allowed if its class is and its name does not begin with an underscore, or if "module.Class.method" is.
    """
    kind = type(value)
    class_name = _full_name(kind.__module__, kind.__qualname__)
    method = f"{class_name}.{name}"
    if _C._allowed_by(method) == "" and (name.startswith("_") or not _C._allowed_by(class_name)):
        raise _refused(method)
