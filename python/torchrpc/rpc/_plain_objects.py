"""Sends Python values without pickle, for workers that were started with `pickle="off"`: plain data, and objects of
registered or listed classes, as the name of the class and the values of its fields.

The extension writes and reads plain data itself (PROTOCOL.md, "Values"). `lower_call` and `lower_result` turn other
values into plain data in which each tuple begins with a letter for its meaning. `restore_call` and `restore_result` do
the reverse. Threads: any.
"""

import builtins
import dataclasses
import enum
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torchrpc import _C

from . import _errors
from ._allow_list import claimed_name, find_listed, is_listed_class
from ._errors import NameNotFoundError, NotAllowedError, SerializationError
from ._names import NAMED_KINDS, find_loaded, has_name, shortened, this_worker

_T = TypeVar("_T", bound=type)

_GREATEST_DEPTH = 90  # of values; an object takes two levels of plain data, of which the extension allows 200
_data_classes: dict[str, type] = {}  # by "module.qualified name"


def register_data_class(cls: _T) -> _T:
    """Let workers with `pickle="off"` send and receive objects of this class; use it as a decorator.

    Args:
        cls (type): a dataclass, a NamedTuple, an Enum, or a class whose objects have all their state in their
            `__dict__`. The same class must be registered on the receiver.

    Returns:
        type: the class.

    Raises:
        TypeError: `cls` is not a class, or has no name of its own at the top level of a module.

    The receiver creates a dataclass or NamedTuple with its constructor, which can check the values, and an object of
    another class without a constructor. Classes in `allowed_functions` need no registration. Any thread may call this
    function.

    Example:
        >>> @rpc.register_data_class
        ... @dataclasses.dataclass
        ... class Sample:
        ...     image: torch.Tensor
        ...     label: int
    """
    name = claimed_name(cls) if isinstance(cls, type) else ""
    if not name or "<" in name:
        raise TypeError(f"register_data_class takes a class at the top level of a module, but got {cls!r}.")
    _data_classes[name] = cls
    return cls


def _is_data_class(cls: type, allowed: _C._AllowList | None) -> bool:
    return _data_classes.get(claimed_name(cls)) is cls or (allowed is not None and is_listed_class(cls, allowed))


class _Unsendable(Exception):
    """A value has no plain form. The arguments say where the value is, and why."""


# --- Writing ---


def lower_call(to: str, function: Any, args: tuple, kwargs: dict) -> list:
    """Return the plain form of the arguments of a call.

    Raises:
        SerializationError: something cannot be sent; the text names it and says what to do.
    """
    called = getattr(function, "__qualname__", repr(function))
    if not isinstance(function, NAMED_KINDS) or not has_name(function):
        raise SerializationError(
            f"Cannot send the call of {called} to {to}: with pickle='off', functions are sent by name. "
            "Use a function or class that has a name at the top level of a module; for a method, an RRef's rpc_sync().",
            to,
        )
    try:
        return [
            [_lower(value, f"argument {position}", [], 0) for position, value in enumerate(args)],
            {name: _lower(value, f"argument {name!r}", [], 0) for name, value in kwargs.items()},
        ]
    except _Unsendable as exc:
        where, why = exc.args
        raise SerializationError(f"Cannot send {where} of the call of {called} to {to}: {why}", to) from None


def lower_result(value: Any) -> Any:
    """Return the plain form of a result. Raises SerializationError."""
    try:
        return _lower(value, "the result", [], 0)
    except _Unsendable as exc:
        where, why = exc.args
        raise SerializationError(f"{this_worker()} cannot send {where}: {why}", "") from None


def _lower(value: Any, where: str, outer: list[int], depth: int) -> Any:
    """Return the plain form of `value`. `outer` has the ids of the containers around it."""
    kind = type(value)
    if value is None or kind in _AS_THEY_ARE or isinstance(value, _C.PyRRef) or kind is torch.nn.Parameter:
        if kind is torch.nn.Parameter and vars(value):
            raise _Unsendable(where, "it is a Parameter with attributes of its own, which would be lost.")
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else ("i", hex(value))
    if kind is _C.WorkerInfo:
        return ("w", value.name, value.id)
    if kind is torch.Size:
        return ("S", *value)
    if isinstance(value, NAMED_KINDS):
        if not has_name(value):
            raise _Unsendable(where, f"{value!r} has no name at the top level of a module. {_REMEDY}")
        return ("g", value.__module__, value.__qualname__)
    if id(value) in outer or depth > _GREATEST_DEPTH:
        raise _Unsendable(where, f"a {kind.__qualname__} contains itself, or is nested too deeply.")
    outer.append(id(value))
    try:
        return _lower_container(kind, value, where, outer, depth + 1)
    finally:
        outer.pop()


_AS_THEY_ARE = frozenset((bool, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device))
_REMEDY = (
    'This worker was started with pickle="off": send plain data, tensors, RRefs, or objects of a class that '
    "rpc.register_data_class or allowed_functions has; or create the object on the callee with rpc.remote()."
)


def _lower_container(kind: type, value: Any, where: str, outer: list[int], depth: int) -> Any:
    def lower(part: Any, name: str) -> Any:
        return _lower(part, f"{where}{name}", outer, depth)

    if kind is list:
        return [lower(part, f"[{index}]") for index, part in enumerate(value)]
    if kind is tuple:
        return ("t", *(lower(part, f"[{index}]") for index, part in enumerate(value)))
    if kind is dict:
        return {lower(key, " (a key)"): lower(part, f"[{key!r}]") for key, part in value.items()}
    if kind in (set, frozenset):
        return ("s" if kind is set else "f", *(lower(part, " (an element)") for part in value))
    name = f"{where} ({kind.__qualname__})" if " (" not in where else where
    if not _is_data_class(kind, _C._allow_list()):
        raise _Unsendable(name, f"a {kind.__module__}.{kind.__qualname__} is no plain data. {_REMEDY}")
    if isinstance(value, enum.Enum):
        return ("e", kind.__module__, kind.__qualname__, value.name)
    fields = {key: lower(part, f".{key}") for key, part in _fields(value).items()}
    return ("o", kind.__module__, kind.__qualname__, fields)


def _fields(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return dict(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    return dict(vars(value))


# --- Reading ---


def restore_call(lowered: Any, allowed: _C._AllowList | None) -> tuple[tuple, dict]:
    """Return the arguments of a call."""
    _require(type(lowered) is list and [type(part) for part in lowered] == [list, dict])
    args, kwargs = lowered
    _require(all(type(name) is str for name in kwargs))
    return (
        tuple(_restore(value, allowed) for value in args),
        {name: _restore(value, allowed) for name, value in kwargs.items()},
    )


def restore_result(lowered: Any, allowed: _C._AllowList | None) -> Any:
    """Return the value that `lower_result` has lowered."""
    return _restore(lowered, allowed)


def _require(condition: bool) -> None:
    if not condition:
        raise SerializationError("malformed message: it has a tuple that stands for no object", "")


def _made(make: Callable[..., Any], *arguments: Any) -> Any:
    """Return `make(*arguments)`; raise SerializationError if the received arguments are malformed."""
    try:
        return make(*arguments)
    except (TypeError, ValueError, OverflowError, RuntimeError) as exc:
        raise SerializationError(f"malformed message: {exc}", "") from exc


def _restore(value: Any, allowed: _C._AllowList | None) -> Any:
    kind = type(value)
    if kind is list:
        return [_restore(part, allowed) for part in value]
    if kind is dict:
        return _made(dict, [(_restore(key, allowed), _restore(part, allowed)) for key, part in value.items()])
    if kind is not tuple:
        return value
    _require(bool(value) and type(value[0]) is str and value[0] in _RESTORE)
    return _RESTORE[value[0]](value[1:], allowed)


def _restore_tuple(parts: tuple, allowed: _C._AllowList | None) -> tuple:
    return tuple(_restore(part, allowed) for part in parts)


def _restore_int(parts: tuple, _: _C._AllowList | None) -> int:
    _require(len(parts) == 1 and type(parts[0]) is str and len(parts[0]) < 1 << 16)
    return _made(int, parts[0], 16)


def _restore_size(parts: tuple, _: _C._AllowList | None) -> torch.Size:
    _require(all(type(part) is int for part in parts))
    return _made(torch.Size, parts)


def _restore_worker(parts: tuple, _: _C._AllowList | None) -> _C.WorkerInfo:
    _require([type(part) for part in parts] == [str, int])
    return _made(_C.WorkerInfo, *parts)


def _restore_global(parts: tuple, allowed: _C._AllowList | None) -> Any:
    _require([type(part) for part in parts] == [str, str])
    module, qualified_name = parts
    if allowed is not None:
        return _data_classes.get(f"{module}.{qualified_name}") or find_listed(module, qualified_name, allowed)
    if found := find_loaded(module, qualified_name):
        return found
    raise NameNotFoundError(
        f"{this_worker()} has no function or class {shortened(f'{module}.{qualified_name}')} in a loaded module. With "
        "pickle='off', reading a value imports nothing: import the module there first.",
        "",
    )


def _restore_enum(parts: tuple, allowed: _C._AllowList | None) -> Any:
    _require([type(part) for part in parts] == [str, str, str])
    cls = _find_data_class(parts[0], parts[1], allowed)
    members = cls.__members__ if issubclass(cls, enum.Enum) else {}
    _require(parts[2] in members)
    return members[parts[2]]


def _restore_object(parts: tuple, allowed: _C._AllowList | None) -> Any:
    _require([type(part) for part in parts] == [str, str, dict] and all(type(name) is str for name in parts[2]))
    cls = _find_data_class(parts[0], parts[1], allowed)
    fields = {name: _restore(part, allowed) for name, part in parts[2].items()}
    if issubclass(cls, tuple):
        _require(hasattr(cls, "_fields") and fields.keys() == set(cls._fields))
        return cls(**fields)
    if dataclasses.is_dataclass(cls):
        known = dataclasses.fields(cls)
        _require(fields.keys() == {field.name for field in known})
        made: Any = cls(**{field.name: fields[field.name] for field in known if field.init})
        for field in known:
            if not field.init:
                object.__setattr__(made, field.name, fields[field.name])
        return made
    # A metaclass or a __new__ of the class does not run.
    _require(not issubclass(cls, (enum.Enum, type, BaseException)))
    plain = object.__new__(cls)
    vars(plain).update(fields)
    return plain


_RESTORE: dict[str, Callable[[tuple, _C._AllowList | None], Any]] = {
    "t": _restore_tuple,
    "s": lambda parts, allowed: _made(set, _restore_tuple(parts, allowed)),
    "f": lambda parts, allowed: _made(frozenset, _restore_tuple(parts, allowed)),
    "i": _restore_int,
    "S": _restore_size,
    "w": _restore_worker,
    "g": _restore_global,
    "e": _restore_enum,
    "o": _restore_object,
}


def _find_data_class(module: str, qualified_name: str, allowed: _C._AllowList | None) -> type:
    """Return the class of that name if it is registered or listed here. For another name, nothing is imported."""
    name = f"{'__main__' if module == '__mp_main__' else module}.{qualified_name}"
    if found := _data_classes.get(name):
        return found
    if allowed is not None and allowed.entry_for(name):
        found = find_listed(module, qualified_name, allowed)
        if isinstance(found, type) and is_listed_class(found, allowed):
            return found
    raise NotAllowedError(
        f"{this_worker()} knows no data class {shortened(name)}: decorate it there, too, with rpc.register_data_class, "
        "in a module that is loaded there, or list it in allowed_functions.",
        "",
    )


# --- Exceptions ---

_NAMED = b"N"  # the first byte of the detail of an exception that only names the type


def describe_type(exc: BaseException) -> bytes:
    """On the callee: return the bytes that `find_type` reads."""
    cls = type(exc)
    return _NAMED + f"{cls.__module__}\0{cls.__qualname__}".encode() if has_name(cls) else b""


def find_type(detail: bytes, allowed: _C._AllowList | None) -> type[Exception] | None:
    """On the caller: return the exception type that the detail names; None if it names none, or no allowed one.

    Python's and torchrpc's exceptions are allowed, and registered and listed classes.
    """
    if not detail.startswith(_NAMED):
        return None
    module, _, name = detail[len(_NAMED) :].decode(errors="replace").partition("\0")
    if module in ("builtins", "torchrpc.rpc"):
        found: Any = vars(builtins if module == "builtins" else _errors).get(name)
    else:
        try:
            found = _find_data_class(module, name, allowed)
        except Exception:
            return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None
