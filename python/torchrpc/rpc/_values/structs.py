"""Dataclasses that C++ programs know as structs (TORCHRPC_STRUCT). They are sent as their name and their fields, also
between Python workers, and need no pickle. The extension writes and reads them (PROTOCOL.md, "Values"). Threads: any.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, overload

from .._errors import SerializationError
from .._security.allow_list import claimed_name
from .names import shortened, this_worker
from .plain_objects import register_data_class

_T = TypeVar("_T", bound=type)

struct_fields: dict[type, tuple[str, tuple[str, ...]]] = {}  # class -> name of the struct, names of its fields
_classes: dict[str, type] = {}  # by the name of the struct


@overload
def cpp_struct(cls: _T, /) -> _T: ...
@overload
def cpp_struct(cls: None = None, /, *, name: str | None = None) -> Callable[[_T], _T]: ...
def cpp_struct(cls: Any = None, /, *, name: str | None = None) -> Any:
    """Decorator: send objects of a dataclass as the C++ struct of the same name, and receive such structs as objects.

    A C++ program has `struct Point { double x = 0, y = 0; }; TORCHRPC_STRUCT(Point, x, y);`. Its functions take and
    return objects of the dataclass, also within lists, tuples, dicts and other structs. Python workers also send
    objects to each other in this way, without pickle: decorate the class on each worker.

    Args:
        cls (type): a dataclass. The values of its fields must be what C++ takes: None, bool, int, float, complex, str,
            bytes, torch.Tensor, dtype, device, RRef, structs, and lists, tuples and dicts of those.
        name (str, optional): the name of the struct, as in TORCHRPC_STRUCT or TORCHRPC_STRUCT_AS. Default: the name of
            the class, without its module.

    Returns:
        type: the class.

    Raises:
        TypeError: `cls` is not a dataclass, or the name is not a str.
        ValueError: another class has that name, or the name is empty.

    Fields with defaults may be added on one worker after the other: the receiver ignores a field that it does not know,
    and gives its default to a field that the sender does not have. A call fails with a SerializationError if a field
    without a default is missing, or if each side has fields that the other does not have, as after a renaming. The
    receiver creates objects with the constructor, which can check the values. Attributes that are not fields are not
    sent. Any thread may call this function.

    Example:
        >>> @torchrpc.cpp_struct
        ... @dataclasses.dataclass
        ... class Point:
        ...     x: float = 0.0
        ...     y: float = 0.0
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"the name of a struct must be a str, but is a {type(name).__name__}: {name!r}")
    if cls is None:
        return lambda decorated: _register(decorated, name)
    return _register(cls, name)


def _register(cls: Any, name: str | None) -> Any:
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        raise TypeError(f"cpp_struct takes a dataclass, but got {cls!r}: put @dataclasses.dataclass below it.")
    name = cls.__name__ if name is None else name
    if not name:
        raise ValueError(f"The name of the struct for {cls!r} is empty.")
    before = _classes.get(name)
    if before is not None and claimed_name(before) != claimed_name(cls):
        raise ValueError(f"{before!r} is the struct {name} already: give {cls!r} another name, cpp_struct(name=...).")
    if "<" not in cls.__qualname__:
        register_data_class(cls)  # for objects in values that the extension cannot write for another reason
    _classes[name] = cls
    struct_fields[cls] = (name, tuple(field.name for field in dataclasses.fields(cls)))
    return cls


def make_struct(name: str, values: dict[str, Any]) -> Any:
    """Return an object of the dataclass that is registered for the struct of that name. Raises SerializationError."""
    cls = _classes.get(name)
    if cls is None:
        raise SerializationError(
            f"{this_worker()} knows no dataclass for the struct {shortened(name)}: decorate one there with "
            "torchrpc.cpp_struct, in a module that is loaded there.",
            "",
        )
    fields = dataclasses.fields(cls)
    missing = [field.name for field in fields if field.name not in values]
    unknown = values.keys() - {field.name for field in fields}
    if unknown and missing:
        raise SerializationError(
            f"The {shortened(name)} that was sent has fields that are unknown on {this_worker()} "
            f"({', '.join(sorted(map(shortened, unknown)))}) and lacks others ({', '.join(missing)}): fields may be "
            "added on one side, but not renamed.",
            "",
        )
    for field in fields:
        has_default = not (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
        if field.name in missing and field.init and not has_default:
            raise SerializationError(
                f"The {name} that was sent has no field {field.name}, for which {cls.__qualname__} on {this_worker()} "
                "has no default: give it one, or add the field on the sender.",
                "",
            )
    made = cls(**{field.name: values[field.name] for field in fields if field.init and field.name in values})
    for field in fields:
        if not field.init and field.name in values:
            object.__setattr__(made, field.name, values[field.name])
    return made
