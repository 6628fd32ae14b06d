"""What others may run on a worker that was started with `allowed_functions`, and what it builds from what they send.

The extension checks operators, script functions and C++ functions (csrc/node/allow_list.h) and asks here for what is
Python's. A name that is refused is not even looked up: nothing is imported for it. Any thread.
"""

import builtins
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from torchrpc import _C

from ._cpp_functions import CppFunction
from ._exceptions import find_global

# What a group needs for itself (joining, leaving, fetching, profiling, optimizers, remote modules). Those that run
# something of the user's take it as an argument, which is looked up by the list, too.
_OWN = """
    rpc.internal.PythonUDF rpc.rref_proxy._call_method
    rpc.api._gather_to_leader rpc.api._broadcast_to_followers rpc.api._rref_typeof_on_owner
    rpc._utils._update_group_membership
    rpc._pickler._rref _C.WorkerInfo
    optim._parts._make optim._parts._step optim._parts._state optim._parts._load
    nn.remote_module._create_module nn.remote_module._run_forward nn.remote_module._parameter_rrefs
    nn.remote_module._set_training
    profiler._start profiler._stop profiler._clock
"""
# What else they raise than Python's own exceptions.
_ERRORS = """
    rpc.WorkerLostError rpc._allow_list.NotAllowedError rpc._exceptions.NameNotFoundError
    rpc._exceptions.ModuleNotImportableError
"""
# Data, whatever is in it: none of these calls anything that comes with it.
_DATA = """
    builtins.bool builtins.bytearray builtins.bytes builtins.complex builtins.dict builtins.float builtins.frozenset
    builtins.int builtins.list builtins.object builtins.range builtins.set builtins.slice builtins.str builtins.tuple
    collections.OrderedDict collections.deque
    datetime.date datetime.datetime datetime.time datetime.timedelta datetime.timezone
    decimal.Decimal fractions.Fraction uuid.UUID
    torch.Size torch.device torch._utils._rebuild_parameter torch.nn.parameter.Parameter torch.Tensor
    torch.serialization._get_layout
"""
_ALWAYS = frozenset([*(f"torchrpc.{name}" for name in (_OWN + _ERRORS).split()), *_DATA.split()])


class NotAllowedError(RuntimeError):
    """The worker's `allowed_functions` do not have what a caller wanted to run or to send."""


def names_of(entries: Iterable[Callable[..., Any] | str]) -> list[str]:
    """The entries of `allowed_functions` as the names that calls arrive with.

    Raises:
        TypeError: an entry that is neither a callable nor a str.
        ValueError: a function that has no name of its own at the top level of a module.
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
    return _full(module, name)


def _full(module: str, name: str) -> str:
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"


def _refused(name: str) -> NotAllowedError:
    worker = _C._get_current_rpc_agent().get_worker_info().name
    return NotAllowedError(
        f"{worker} does not let others run or send {name}: its allowed_functions do not have it. If they may, start "
        f"{worker} with TensorPipeRpcBackendOptions(allowed_functions=[..., {name!r}])."
    )


def find_allowed(module: str, qualified_name: str) -> Any:
    """`find_global` of what the list allows.

    Raises:
        NotAllowedError: it does not; nothing has been imported.
    """
    name = _full(module, qualified_name)
    if name in _ALWAYS or _is_torch_constant(module, qualified_name):
        return find_global(module, qualified_name)
    if not (entry := _C._allowed_by(name)):
        raise _refused(name)
    found = find_global(module, qualified_name)
    # "package.*" stands for what the package has made itself, not for all that it has imported.
    if entry != name and _full(getattr(found, "__module__", ""), getattr(found, "__qualname__", "")) != name:
        raise _refused(name)
    return found


def check_allowed(name: str) -> None:
    """Raise NotAllowedError unless an entry allows this name, which is no Python object's."""
    if not _C._allowed_by(name):
        raise _refused(name)


def _is_torch_constant(module: str, name: str) -> bool:
    """A dtype, layout or memory format."""
    kinds = torch.dtype, torch.layout, torch.memory_format
    return module == "torch" and isinstance(vars(torch).get(name), kinds)


def find_exception(module: str, qualified_name: str) -> Any:
    """The type of an exception that a callee has raised: any of Python's own, or what the list allows."""
    if _C._allowed_by("") is None:
        return find_global(module, qualified_name)
    found = vars(builtins).get(qualified_name) if module == "builtins" else None
    return found if isinstance(found, type) and issubclass(found, Exception) else find_allowed(module, qualified_name)


def check_method(value: Any, name: str) -> None:
    """Raise NotAllowedError if others may not call this method of an object that an RRef refers to.

    They may if its class is allowed, unless the name begins with an underscore, or if "module.Class.method" is.
    """
    kind = type(value)
    class_name = _full(kind.__module__, kind.__qualname__)
    method = f"{class_name}.{name}"
    if _C._allowed_by(method) == "" and (name.startswith("_") or not _C._allowed_by(class_name)):
        raise _refused(method)
