"""The allow-list of a worker that was started with `allowed_functions`: which functions its callers may run there, and
which objects it unpickles.

The extension checks operators, script functions and C++ functions (csrc/node/allow_list.h) and calls these functions
for Python objects, on any thread. A refused name is not looked up, so nothing is imported for it.
"""

import builtins
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from torchrpc import _C

from ._cpp_functions import CppFunction
from ._errors import NotAllowedError
from ._names import find_global

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


def _full_name(module: str, name: str) -> str:
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"


def _refused(name: str) -> NotAllowedError:
    worker = _C._get_current_rpc_agent().get_worker_info().name
    return NotAllowedError(
        f"{worker} does not let others run or send {name}: its allowed_functions do not have it. If they may, start "
        f"{worker} with TensorPipeRpcBackendOptions(allowed_functions=[..., {name!r}])."
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
