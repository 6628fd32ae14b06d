"""The allow-list of a worker that was started with `allowed_functions`: the functions that its callers may run there,
and the classes of which they may send objects.

The extension checks operators, script functions and C++ functions (csrc/node/allow_list.h) and calls these functions
for Python objects, on any thread. A refused name is not looked up, so nothing is imported for it. `_plain_objects`
makes the objects. `entries` has what may be listed.
"""

import enum
import functools
import types
from collections.abc import Iterable
from typing import Any

import torch

from torchrpc import _C

from .._errors import NotAllowedError
from .._values.names import find_global, find_module
from .._values.names import shortened as shortened
from .entries import OPERATOR_OBJECTS, classes_of_entries, is_unsafe_name, why_unsafe
from .entries import Entries as Entries
from .entries import allowances_of as allowances_of
from .entries import resolve as resolve
from .objects import (
    LARGE_PACKAGES,
    NOTHING,
    bases_of,
    canonical_name,
    claimed_parts,
    defined_attribute,
    find_loaded,
    full_name,
    functions_behind,
    is_class,
    is_defined_by,
    is_own_name,
    package_of,
)
from .objects import claimed_name as claimed_name
from .objects import class_attribute as class_attribute

# Functions that the package itself calls on other workers: to join and leave a group, for RRefs, profiles, optimizers
# and remote modules. A call may run them, but they cannot be sent as values. Those that run a user's function check it
# against the list.
_OWN = """
    rpc.rref_proxy._call_method
    rpc.api._gather_to_leader rpc.api._broadcast_to_followers rpc.api._gathering_numbers rpc.api._rref_typeof_on_owner
    rpc._utils._update_group_membership
    optim._parts._make optim._parts._step optim._parts._state optim._parts._load
    nn.remote_module._create_module nn.remote_module._run_forward nn.remote_module._parameter_rrefs
    nn.remote_module._set_training
    profiler._start profiler._stop profiler._clock
"""
CALLED_BY_THE_PACKAGE = frozenset(f"torchrpc.{name}" for name in _OWN.split())
# The functions of `_OWN` that clients may run, too. In gatherings and joins, a worker acts only for itself.
_OF_CLIENTS = """
    rpc.rref_proxy._call_method rpc.api._rref_typeof_on_owner rpc.api._gather_to_leader
    rpc.api._gathering_numbers rpc._utils._update_group_membership
    nn.remote_module._create_module nn.remote_module._run_forward nn.remote_module._parameter_rrefs
    nn.remote_module._set_training
"""
_FOR_CLIENTS = frozenset(f"torchrpc.{name}" for name in _OF_CLIENTS.split())


def refused(name: str, allowed: _C._AllowList) -> NotAllowedError:
    """Return the error for a name that is not on the list."""
    name = shortened(name)
    if not allowed.callers:
        return NotAllowedError(
            f"{allowed.worker} does not let this caller run or send {name}: no pattern in its allowed_functions "
            "matches the caller's name.",
            allowed.worker,
        )
    start = f"{_refusal(name, allowed)}{_of_callers(allowed)}"
    if why := why_unsafe(name, look_up=False):
        return NotAllowedError(f"{start}, and cannot have it: it {why}", allowed.worker)
    is_special = name.rpartition(".")[2].startswith("__")
    return NotAllowedError(f"{start}. {_remedy(name, allowed, not is_special and is_own_name(name))}", allowed.worker)


def _refusal(name: str, allowed: _C._AllowList) -> str:
    others = "others" if allowed.callers == "*" else "this caller"
    return f"{allowed.worker} does not let {others} run or send {name}: its allowed_functions do not have it"


def _of_callers(allowed: _C._AllowList) -> str:
    return "" if allowed.callers == "*" else f" for workers named {allowed.callers!r}"


def _remedy(name: str, allowed: _C._AllowList, is_own: bool) -> str:
    """Return the remedy: list the name if it is the program's own, else a function of the program."""
    if not is_own:
        return "If they may, let a function of your own do what callers need, and list that function."
    entries = f"[..., {name!r}]" if allowed.callers == "*" else f"{{{allowed.callers!r}: [..., {name!r}]}}"
    return f"If they may, start {allowed.worker} with TensorPipeRpcBackendOptions(allowed_functions={entries})."


def find_allowed(module: str, qualified_name: str, allowed: _C._AllowList | None = None) -> Any:
    """Return the function of a call: one of the package's own, or one on the list.

    Args:
        allowed: default: the list in force.

    Raises:
        NotAllowedError: the list does not allow the name; nothing has been imported.
    """
    allowed = allowed or _C._allow_list()
    name = f"{module}.{qualified_name}"
    if allowed is None or name in CALLED_BY_THE_PACKAGE:
        if allowed is not None:
            check_member(name, allowed)
        return find_global(module, qualified_name)
    return find_listed(module, qualified_name, allowed)


def check_member(name: str, allowed: _C._AllowList) -> None:
    """Raise NotAllowedError if the caller is a client, and only members may run this function of the package."""
    if allowed.is_for_member or name in _FOR_CLIENTS:
        return
    raise NotAllowedError(
        f"{allowed.worker} does not let a client run {name}: only members of the group may. Give the caller an "
        "identity with the role member if it may.",
        allowed.worker,
    )


def find_listed(module: str, qualified_name: str, allowed: _C._AllowList) -> Any:
    """Return a function, class or member of an enum that the list has.

    Raises:
        NotAllowedError: the list does not allow the name; nothing has been imported.
    """
    name = full_name(module, qualified_name)
    if not (entry := _entry_for(module, qualified_name, allowed)):
        raise refused(name, allowed)
    if entry == name:
        found = find_global(module, qualified_name)
    else:
        found = _find_defined(module, qualified_name)
        # "package.*" allows the objects that the package defines, not those that it has imported from elsewhere.
        if found is None or claimed_name(found) != name:
            raise refused(name, allowed)
    if not (callable(found) or isinstance(found, enum.Enum)):
        raise refused(name, allowed)
    if isinstance(found, OPERATOR_OBJECTS):
        raise NotAllowedError(
            f"{allowed.worker} runs {name} only in a call of an operator, which checks the arguments by its schema, "
            "and not as a Python function.",
            allowed.worker,
        )
    return found


def _entry_for(module: str, qualified_name: str, allowed: _C._AllowList) -> str:
    """Return the entry that allows the name; an empty string if there is none.

    A prefix allows no functions, classes and methods whose name, or whose class's name, begins with an underscore, and
    none that no entry may name.
    """
    name = full_name(module, qualified_name)
    entry = allowed.entry_for(name)
    is_private = any(part.startswith("_") for part in qualified_name.split("."))
    return "" if entry != name and (is_private or is_unsafe_name(name)) else entry


def _find_defined(module: str, qualified_name: str) -> Any:
    """Return the function or class of that name; None if the module does not define it itself.

    No properties and no other descriptors run.
    """
    if module.endswith(".__main__"):
        return None  # importing it runs a program
    found: Any = find_module(module)
    first, *rest = qualified_name.split(".")
    if not isinstance(found, types.ModuleType):
        return None
    if first not in vars(found) and not rest:
        return find_global(module, qualified_name)  # raises, or finds what the module makes at its first use
    found = vars(found).get(first)
    for part in rest:
        if not isinstance(found, type) or not isinstance(class_attribute(found, part), _PARTS_OF_CLASSES):
            return None
        found = getattr(found, part)
    return found


_PARTS_OF_CLASSES = (type, types.FunctionType, classmethod, staticmethod)


def hidden_name(kind: type, names: Iterable[str]) -> str | None:
    """Return the first of these names of attributes that the state of a received object may not have; None if it may
    have all.

    Names such as `__array_interface__` and `__reduce_ex__` tell Python and libraries what to do with an object. An
    attribute would hide a method, a property or another descriptor of its class, or a callable used as a method.
    """
    for name in names:
        if name.startswith("__") and name.endswith("__"):
            return name
        found = class_attribute(kind, name)
        is_needed = hasattr(type(found), "__get__") or (callable(found) and not isinstance(found, type))
        if is_needed and name not in (class_attribute(kind, "__dataclass_fields__") or ()):
            return name
    return None


def check_allowed(name: str, allowed: _C._AllowList) -> None:
    """Raise NotAllowedError unless an entry allows this name, which does not name a Python object."""
    if not allowed.entry_for(name):
        raise refused(name, allowed)


def is_listed_class(kind: type, allowed: _C._AllowList) -> bool:
    """Whether the list has this very class, and not only a class whose name this one claims."""
    found, entries = classes_of_entries.get(id(kind), (None, ()))
    if found is kind and any(allowed.entry_for(entry) for entry in entries):
        return True
    module, name = claimed_parts(kind)
    return bool(name and _entry_for(module, name, allowed)) and find_loaded(full_name(module, name)) is kind


def check_callable(function: Any) -> None:
    """Raise NotAllowedError if a function of the package may not call this function or class for another worker."""
    if (allowed := _C._allow_list()) is None:
        return
    if isinstance(function, type):
        if is_listed_class(function, allowed):
            return
    elif isinstance(function, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        module, name = claimed_parts(function)
        if name and _entry_for(module, name, allowed) and find_loaded(full_name(module, name)) == function:
            return
    else:
        raise refused(f"{claimed_name(type(function))}.__call__", allowed)
    raise refused(claimed_name(function) or "a function without a name", allowed)


def check_method(value: Any, name: str, kind: type | None = None, base: type | None = None) -> None:
    """Raise NotAllowedError if other workers may not call this method of an object that an RRef refers to.

    A method is allowed if "module.Class.method" is. A method whose name does not begin with an underscore is also
    allowed if its class is, unless the class has it from another package: see `_why_foreign`. Properties are no
    methods, and do not run.

    Args:
        kind: the class that the list must have; default: the object's. The object is a script module of that class.
        base: the class of torch for whose subclasses the package itself calls this method. The classes between `kind`
            and `base` may define it, whatever package they are of.
    """
    if (allowed := _C._allow_list()) is None:
        return
    source = kind or type(value)
    module, class_name = claimed_parts(source)
    if type(name) is not str:
        raise refused(f"a method of {full_name(module, class_name)}", allowed)
    full = f"{full_name(module, class_name)}.{name}"
    is_found_by_name = bool(class_name) and find_loaded(full_name(module, class_name)) is source
    entry = _entry_for(module, f"{class_name}.{name}", allowed) if is_found_by_name else ""
    definer, found = defined_attribute(source, name)
    if not _is_method_of_object(value, name, found, source):
        raise refused(full, allowed)
    for function in functions_behind(found):
        if is_unsafe_name(canonical_name(function)):
            raise _refused_method(full, canonical_name(function), allowed, is_unsafe=True)
    if entry == full:
        return
    if not (entry or (not name.startswith("_") and is_listed_class(source, allowed))):
        raise _refused_method(full, "", allowed)
    if why := _why_foreign(source, definer, found, base, allowed):
        raise _refused_method(full, why, allowed)


def _why_foreign(source: type, definer: type, found: Any, base: type | None, allowed: _C._AllowList) -> str:
    """Return why a method is not one of a listed class, as a clause; an empty string if it is.

    The class that defines the method must be on the list, or belong to the package of the listed class, which is not
    Python, torch or NumPy. The functions that run must belong to the same package: a class may have `os.getpid` as an
    attribute.

    Args:
        source: the class that is on the list.
        found: the attribute, as the class `definer` stores it.
        base: as for `check_method`.
    """
    packages = {package_of(definer)}
    is_of_base = base is not None and issubclass(definer, base)
    if is_of_base:
        # torch wraps the step of an optimizer's class in a function, which it stores in that class.
        packages |= {package_of(cls) for cls in bases_of(source) if issubclass(cls, base)}  # type: ignore[arg-type]
    is_of_package = package_of(definer) == package_of(source) and package_of(source) not in LARGE_PACKAGES
    if not (definer is source or is_of_package or is_of_base or is_listed_class(definer, allowed)):
        return f"which the class inherits from {claimed_name(definer)}, a class that they do not have"
    functions = functions_behind(found)
    if not functions:
        return f"which is a {claimed_name(type(found))}, and not a function that its class defines"
    for function in functions:
        if not is_defined_by(function, definer, packages):
            return f"which is the function {canonical_name(function)} of another package"
    return ""


def _refused_method(name: str, why: str, allowed: _C._AllowList, is_unsafe: bool = False) -> NotAllowedError:
    """Return the error for a method that the class of an object has.

    Args:
        why: a clause about the method; if `is_unsafe`, the name of the function that runs.
    """
    start = f"{_refusal(shortened(name), allowed)}{_of_callers(allowed)}"
    if is_unsafe:
        return NotAllowedError(
            f"{start}, and cannot have it: it is {why}, by which callers can run any code or reach any memory or file. "
            "Let a function of your own do what callers need, and list that function.",
            allowed.worker,
        )
    owner, _, method = name.rpartition(".")
    is_own = not method.startswith("__") and is_own_name(owner) and not why_unsafe(name)
    return NotAllowedError(f"{start}{why and ', '}{why}. {_remedy(name, allowed, is_own)}", allowed.worker)


def _is_method_of_object(value: Any, name: str, found: Any, source: type) -> bool:
    """Whether `value.name` is the attribute of that name of the class, and a function.

    An attribute of the object itself is not a method of the class: the object's state may come from another worker.
    """
    if is_class(found) or not (callable(found) or isinstance(found, _WRAPPED_METHODS)):
        return False  # a class, a property or another descriptor, or nothing
    own = _own_attribute(value, name)
    if type(own) is torch._C.ScriptMethod:
        return True  # script modules keep the methods that they have looked up
    if source is not type(value):
        # Of the methods of its class, a script module has those that torch has compiled, and those of nn.Module.
        return own is NOTHING and class_attribute(type(value), name) is class_attribute(torch.nn.Module, name) is found
    return own is NOTHING or hasattr(type(found), "__set__")


def _own_attribute(value: Any, name: str) -> Any:
    """Return the attribute of that name in the state of an object, or NOTHING. No code of its class runs."""
    if is_class(value):
        found = class_attribute(value, name)
        return NOTHING if found is None else found
    try:
        return object.__getattribute__(value, "__dict__").get(name, NOTHING)
    except AttributeError:
        return NOTHING  # the class has __slots__


_WRAPPED_METHODS = (classmethod, staticmethod, functools.partialmethod, functools.singledispatchmethod)


def local_value(rref: Any) -> Any:
    """Return the value of an RRef that another worker has sent. With an allow-list, `rref` must be a real RRef."""
    if (allowed := _C._allow_list()) is None:
        return rref.local_value()
    if not issubclass(type(rref), _C.PyRRef):
        raise NotAllowedError(
            f"{allowed.worker} does not let others send a {type(rref).__qualname__} in the place of an RRef.",
            allowed.worker,
        )
    return _C.PyRRef.local_value(rref)
