"""Takes exceptions apart and makes them of their parts, without a constructor of the program. Threads: any."""

import builtins
import contextlib
import types
from typing import Any

# Python 3.10 has no exception groups.
BaseExceptionGroup: Any = getattr(builtins, "BaseExceptionGroup", ())
_HEAP_TYPE = 1 << 9  # of `__flags__`: the class is not built in
# Objects of any kind, and names for which Python's traceback imports the module `name` to suggest others.
_NOT_TAKEN = ((AttributeError, "obj"), (ImportError, "name_from"))
_MOST_COLUMNS = 1 << 16  # of a line of code: Python's traceback writes a mark below each


def members_of(exc: BaseException) -> dict[str, Any]:
    """Return the values of the attributes that are not in the `__dict__`, but in fields of C or in `__slots__`."""
    values: dict[str, Any] = {}
    for name, member in members_of_type(type(exc)).items():
        with contextlib.suppress(AttributeError):  # a field without a value
            if (value := member.__get__(exc)) is not None:
                values[name] = value
    return values


def members_of_type(cls: type) -> dict[str, Any]:
    """Return the descriptors of these attributes by name."""
    return {
        name: member
        for each in reversed(cls.__mro__)
        for name, member in vars(each).items()
        if isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType))
        and not (name.startswith("__") or name == "args" or (each, name) in _NOT_TAKEN)
    }


def instance(cls: type[Any], args: tuple) -> Any:
    """Return a new exception of that class with these arguments. No constructor of the program runs."""
    base = built_in_base(cls)
    if issubclass(cls, (UnicodeError, BaseExceptionGroup)):  # their constructors check what their methods rely on
        exc = base.__new__(cls, *args)
        base.__init__(exc, *args)
        return exc
    exc = base.__new__(cls)
    BaseException.__setattr__(exc, "args", args)
    return exc


def built_in_base(cls: type[Any]) -> Any:
    """Return the built-in class that determines the fields of `cls` in C."""
    while cls.__flags__ & _HEAP_TYPE:
        cls = cls.__base__ or object
    return cls


def set_state(exc: BaseException, state: dict[str, Any], fields: dict[str, Any]) -> None:
    members = members_of_type(type(exc))
    present = members_of(exc)
    for name, value in fields.items():
        if name in members and name not in present:
            members[name].__set__(exc, value)
    vars(exc).update(state)


def are_fields(cls: type[Exception], fields: Any) -> bool:
    if type(fields) is not dict or not all(type(name) is str for name in fields):
        return False
    if not issubclass(cls, SyntaxError):
        return True
    # Python's traceback relies on this.
    numbers = [fields.get(name, 0) for name in ("lineno", "offset", "end_lineno", "end_offset")]
    are_numbers = all(type(number) is int and number.bit_length() < 64 for number in numbers)
    return are_numbers and type(fields.get("text", "")) is str and max(map(abs, numbers[1::2])) <= _MOST_COLUMNS


def is_notes(name: str, value: Any) -> bool:
    return name == "__notes__" and type(value) is list and all(type(note) is str for note in value)
