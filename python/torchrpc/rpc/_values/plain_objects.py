"""Python's part of the form that values have without pickle. Values travel in it to and from workers with
`allowed_functions`, and between workers with `pickle="off"`.

The extension writes and reads plain data and containers itself (csrc/bindings/py_codec.h; PROTOCOL.md, "Values with
objects"). For any other object it calls `lower_object`, which returns the name of a kind and the parts of which such an
object can be made; `make_object` does the reverse. See Note [Objects without pickle]. Threads: any.
"""

import collections
import copyreg
import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch

from torchrpc import _C

from .._errors import NameNotFoundError, NotAllowedError, SerializationError
from .._security.allow_list import (
    check_allowed,
    claimed_name,
    class_attribute,
    find_listed,
    hidden_name,
    is_listed_class,
    refused,
)
from .arrays import is_of_numpy, lower_array
from .exception_parts import are_fields, built_in_base, instance, is_notes, members_of, set_state
from .names import NAMED_KINDS, find_loaded, find_script_function, has_name, shortened, this_worker
from .quantized import parts_of_packed
from .standard_kinds import CONSTANTS, FREE_CLASSES, LOWERS, MAKERS, NAMES_OF_CONSTANTS, Lower, Make, require

# Note [Objects without pickle]
#
# - The extension makes the parts of an object before the object. So `make_object` does not recurse, and each object in
#   the parts has been checked.
# - Each kind checks the number and the types of its parts, because a peer may have sent anything. Nothing is imported,
#   and nothing is called but constructors of Python, torch and NumPy that take such parts, and those of dataclasses and
#   NamedTuples that are registered or listed.
# - An object of another registered or listed class is made without its constructor. Its fields are set only in its
#   `__dict__` and `__slots__`, under no name that has a meaning for Python or the class.
# - Parts are copied only in proportion to their sizes, for which the extension has a budget. Numbers have limits where
#   their time is more than proportional to their digits.

_T = TypeVar("_T", bound=type)

_MOST_FLAG_BITS = 1 << 10
_MOST_FLAGS = 1 << 12  # members and combinations of one class: Python keeps all of them
_data_classes: dict[str, type] = {}  # by "module.qualified name"


def register_data_class(cls: _T) -> _T:
    """Let workers with `allowed_functions` or `pickle="off"` receive objects of this class; use it as a decorator.

    Args:
        cls (type): a dataclass, a NamedTuple, an Enum, or a class whose objects have all their state in their
            `__dict__` and `__slots__`, and in the list, dict, int … from which the class derives. The same class must
            be registered on the receiver.

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


class _Unsendable(Exception):
    """A value has no form without pickle. The text is a clause whose subject is the value."""


# --- Objects of classes ---


class _Base(NamedTuple):
    """A class of Python whose objects have contents of their own, from which classes may derive."""

    contents: Lower
    kinds: tuple[type, ...]  # of the contents
    make: Make  # an object of a class from that class and the contents, with no method of the class


def _make_deque(cls: Any, most: int | None, items: list) -> Any:
    made = collections.deque.__new__(cls)
    collections.deque.__init__(made, items, most)
    return made


def _make_defaultdict(cls: Any, factory: Any, items: dict) -> Any:
    require(factory is None or isinstance(factory, NAMED_KINDS), "defaultdict")
    made = collections.defaultdict.__new__(cls)
    collections.defaultdict.__init__(made, factory)
    dict.update(made, items)
    return made


def _make_ordered_dict(cls: Any, items: dict) -> Any:
    made = collections.OrderedDict.__new__(cls)
    for key, value in items.items():
        collections.OrderedDict.__setitem__(made, key, value)
    return made


def _filled(base: Any, fill: Callable[[Any, Any], Any]) -> Make:
    def make(cls: Any, contents: Any) -> Any:
        made = base.__new__(cls)
        fill(made, contents)
        return made

    return make


_ALL = slice(None)
_most_of_deque: Any = vars(collections.deque)["maxlen"]
_factory_of_defaultdict: Any = vars(collections.defaultdict)["default_factory"]
_BASES: dict[type, _Base] = {
    int: _Base(lambda value: (int.__int__(value),), (int,), int.__new__),
    float: _Base(lambda value: (float.__float__(value),), (float,), float.__new__),
    str: _Base(lambda value: (str.__str__(value),), (str,), str.__new__),
    bytes: _Base(lambda value: (bytes.__getitem__(value, _ALL),), (bytes,), bytes.__new__),
    tuple: _Base(lambda value: (tuple.__getitem__(value, _ALL),), (tuple,), tuple.__new__),
    list: _Base(lambda value: (list.__getitem__(value, _ALL),), (list,), _filled(list, list.extend)),
    dict: _Base(lambda value: (dict.copy(value),), (dict,), _filled(dict, dict.update)),
    set: _Base(lambda value: (set().union(value),), (set,), _filled(set, set.update)),
    frozenset: _Base(lambda value: (set().union(value),), (set,), frozenset.__new__),
    collections.OrderedDict: _Base(
        lambda value: (dict(collections.OrderedDict.items(value)),), (dict,), _make_ordered_dict
    ),
    collections.Counter: _Base(lambda value: (dict.copy(value),), (dict,), _filled(dict, dict.update)),
    collections.defaultdict: _Base(
        lambda value: (_factory_of_defaultdict.__get__(value), dict.copy(value)), (object, dict), _make_defaultdict
    ),
    collections.deque: _Base(
        lambda value: (_most_of_deque.__get__(value), list(collections.deque.__iter__(value))),
        (object, list),
        _make_deque,
    ),
    object: _Base(lambda value: (), (), object.__new__),
}
_SENT_WITHOUT_NAMES = (collections.OrderedDict, collections.Counter, collections.defaultdict, collections.deque)
_PICKLING_METHODS = (
    *("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__"),
)


def _base_of(cls: type) -> type:
    return next(each for each in type.__dict__["__mro__"].__get__(cls) if each in _BASES)


def _pickling_method(cls: type, names: Iterable[str], base: type) -> str:
    """Return the first of these methods that the class, and not `base`, has; an empty string if there is none."""
    for name in names:
        method = class_attribute(cls, name)
        # Those of torch's modules get and set the attributes.
        is_of_torch = name.endswith("state__") and (getattr(method, "__module__", "") or "").startswith("torch.nn.")
        if method is not class_attribute(base, name) and not is_of_torch:
            return name
    return ""


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(class_attribute(cls, "_fields"), tuple)


def _way_of_pickling(cls: type) -> str:
    """Return the name of the method by which the class makes or reads its pickles itself; an empty string if none."""
    if cls in copyreg.dispatch_table:
        return "copyreg"
    if dataclasses.is_dataclass(cls) or _is_named_tuple(cls):  # a constructor takes the fields
        return _pickling_method(cls, ("__reduce_ex__", "__reduce__"), _base_of(cls))
    return _pickling_method(cls, _PICKLING_METHODS, _base_of(cls))


def _slots_of(cls: type) -> dict[str, Any]:
    """Return the descriptors of the slots that Python classes have declared, by name."""
    return {
        name: slot
        for base in reversed(cls.__mro__)
        if "__slots__" in vars(base)
        for name, slot in vars(base).items()
        if type(slot) is types.MemberDescriptorType and not (name.startswith("__") and name.endswith("__"))
    }


# --- Writing ---

_REMEDY = (
    "Send plain data, tensors, arrays, RRefs, or objects of a class that {listed}; or create the object on the callee "
    "with rpc.remote()."
)
_LISTED_THERE = "the receiver's allowed_functions or rpc.register_data_class there has"
_LISTED_HERE = 'rpc.register_data_class or allowed_functions has, because this worker was started with pickle="off"'


def lower_object(value: Any, classes: tuple | None) -> tuple:
    """Return the name of a kind and the parts of which `make_object` makes such an object.

    Args:
        classes: None: all classes are sent, since the receiver decides which it makes. Or a tuple with this worker's
            allow-list, or None: registered classes are sent, and those on the list.

    Raises:
        _Unsendable: the value has no such form.
    """
    kind = type(value)
    if (known := LOWERS.get(kind)) is not None:
        return known[0], *known[1](value)
    if (name := NAMES_OF_CONSTANTS.get(id(value))) is not None:
        return "constant", name
    if isinstance(value, torch.Tensor):
        return _lower_tensor(kind, value)
    if is_of_numpy(kind):
        try:
            return lower_array(value)
        except TypeError as exc:
            raise _Unsendable(f"cannot be sent: {exc}.") from None
    remedy = _REMEDY.format(listed=_LISTED_HERE if classes else _LISTED_THERE)
    if isinstance(value, NAMED_KINDS):
        if not has_name(value):
            what = "Lambdas and nested functions have none, and code is not sent. "
            raise _Unsendable(f"has no name at the top level of a module. {what}{remedy}")
        return "global", value.__module__, value.__qualname__
    is_sent = kind in _SENT_WITHOUT_NAMES or classes is None or _is_data_class(kind, classes[0])
    if not (is_sent or (isinstance(value, Exception) and kind.__module__ in ("builtins", "torchrpc.rpc"))):
        raise _Unsendable(f"is no plain data. {remedy}")
    return _lower_instance(kind, value, remedy)


def _is_data_class(cls: type, allowed: _C._AllowList | None) -> bool:
    return _data_classes.get(claimed_name(cls)) is cls or (allowed is not None and is_listed_class(cls, allowed))


def _lower_tensor(kind: type, value: torch.Tensor) -> tuple:
    if kind is torch.Tensor:
        try:
            parts = parts_of_packed(value)
        except TypeError as exc:
            raise _Unsendable(f"cannot be sent: {exc}.") from None
        if parts is not None:
            return "quantized_packed", *parts
    if kind is torch.nn.Parameter:
        raise _Unsendable("is a Parameter with attributes of its own, which would be lost.")
    raise _Unsendable("is an object of a subclass of torch.Tensor: send value.as_subclass(torch.Tensor).")


def _lower_instance(cls: type, value: Any, remedy: str) -> tuple:
    names = cls.__module__, cls.__qualname__
    if isinstance(value, enum.Enum):
        return ("flags", *names, value.value) if isinstance(value, enum.Flag) else ("member", *names, value.name)
    if isinstance(value, Exception):
        return _lower_exception(value)
    if isinstance(value, torch.jit.ScriptModule):
        raise _Unsendable(f"is code, which is not sent. {remedy}")
    if method := _way_of_pickling(cls):
        raise _Unsendable(
            f"is an object of a class with its own {method}, which would decide what to call while the value is read. "
            "Make the class a dataclass, send what the object is made of, or create it on the callee with rpc.remote()."
        )
    if dataclasses.is_dataclass(cls):
        return "object", *names, {field.name: getattr(value, field.name) for field in dataclasses.fields(cls)}
    if _is_named_tuple(cls):
        return "object", *names, dict(zip(value._fields, value, strict=True))
    try:
        state = (*cls.__reduce_ex__(value, 2), None)[2]  # type: ignore[call-arg]
    except Exception as exc:  # the class is written in C
        raise _Unsendable(f"cannot be sent: {exc}. {remedy}") from None
    attributes, slots = state if type(state) is tuple else (state, None)
    return "object", *names, {**(attributes or {}), **(slots or {})}, *_BASES[_base_of(cls)].contents(value)


def _pickling_of_exception(cls: type) -> str:
    return _pickling_method(cls, ("__reduce_ex__", "__reduce__", "__setstate__"), built_in_base(cls))


def _lower_exception(value: Exception) -> tuple:
    """Return kind and parts of an exception: its type, arguments, fields in C, and attributes."""
    cls = type(value)
    if method := _pickling_of_exception(cls):
        raise _Unsendable(f"is an exception of a class with its own {method}: send its text.")
    return "exception", cls.__module__, cls.__qualname__, value.args, members_of(value), dict(vars(value))


def refuse_function(function: Any, to: str) -> None:
    """Raise the error for a call of a function that has no name."""
    called = getattr(function, "__qualname__", repr(function))
    raise SerializationError(
        f"Cannot send the call of {called} to {to}: functions are sent by name to a worker with allowed_functions or "
        "pickle='off', and code is not sent: lambdas, nested functions and bound methods have no name there. Use a "
        "function or class that has a name at the top level of a module; for a method, an RRef's rpc_sync().",
        to,
    )


def refuse_to_send(what: tuple | None, path: list[tuple], value: Any, why: Any) -> None:
    """Raise the error for a value that cannot be sent.

    Args:
        what: function and callee of a call whose arguments have the value; None: it is a result.
        path: steps to the value: the kind of the step, and the index or key.
        value: the value, or the object whose part it is.
        why: an exception, or a clause.
    """
    if what is None:
        where = "the result"
    elif path and path[0][1] == 0 and len(path) > 1:
        where, path = f"argument {path[1][1]}", path[2:]
    elif len(path) > 1:
        where, path = f"argument {path[1][1]!r}", path[2:]
    else:
        where = "the arguments"
    is_field = False
    for kind, key in path:
        where += {
            "i": f"[{key}]",
            "v": f".{key}" if is_field else f"[{key!r}]",
            "k": " (a key)",
            "e": " (an element)",
            "p": "",
        }[kind]
        is_field = kind == "p"
    cls = type(value)
    subject = repr(value) if isinstance(value, NAMED_KINDS) else f"a {cls.__qualname__}"
    is_clause = isinstance(why, (_Unsendable, str))
    reason = f"{subject} {why}" if is_clause else f"{type(why).__name__}: {why}"
    to = what[1] if what else ""
    shown = f"{where} ({cls.__qualname__})" if not isinstance(value, NAMED_KINDS) and " (" not in where else where
    start = f"{this_worker()} cannot send {shown}"
    if what is not None:
        called = getattr(what[0], "__qualname__", repr(what[0]))
        start = f"Cannot send {shown} of the call of {called} to {to}"
    raise SerializationError(f"{start}: {reason}", to) from (why if isinstance(why, BaseException) else None)


# --- Reading ---


def make_object(kind: str, parts: tuple, allowed: _C._AllowList | None) -> Any:
    """Return the object of that kind with these parts.

    Raises:
        NotAllowedError, NameNotFoundError: this worker does not make objects of that class.
        SerializationError: no object of that kind has such parts.
        Exception: raised by the constructor of a dataclass or NamedTuple of the program.
    """
    if (make := _MAKERS_OF_CLASSES.get(kind)) is not None:
        return make(parts, allowed)
    maker = MAKERS.get(kind)
    if maker is None:
        raise _malformed(f"it has an object of the unknown kind {shortened(kind)}")
    if maker.kinds is not None and not _are(parts, maker.kinds):
        raise _malformed(f"the parts of a {kind} are not those that are sent")
    return _made(maker.make, *parts)


def _are(parts: tuple, kinds: tuple[type, ...]) -> bool:
    return len(parts) == len(kinds) and all(
        kind is object or type(part) is kind for part, kind in zip(parts, kinds, strict=True)
    )


def _malformed(what: str) -> SerializationError:
    return SerializationError(f"malformed message: {what}", "")


def _made(make: Make, *arguments: Any) -> Any:
    """Return `make(*arguments)`; raise SerializationError if the received arguments are malformed."""
    try:
        return make(*arguments)
    except (TypeError, ValueError, ArithmeticError, RuntimeError, LookupError) as exc:
        raise _malformed(str(exc)) from exc


def _check_parts(condition: Any, kind: str) -> None:
    if not condition:
        raise _malformed(f"the parts of a {kind} are not those that are sent")


def _make_global(parts: tuple, allowed: _C._AllowList | None) -> Any:
    _check_parts(_are(parts, (str, str)), "global")
    module, qualified_name = parts
    name = f"{module}.{qualified_name}"
    if found := FREE_CLASSES.get(name) or _data_classes.get(name):
        return found
    if allowed is not None:
        found = find_listed(module, qualified_name, allowed)
        if isinstance(found, enum.Enum):
            raise refused(name, allowed)
        return found
    if found := find_loaded(module, qualified_name):
        return found
    raise NameNotFoundError(
        f"{this_worker()} has no function or class {shortened(name)} in a loaded module. With pickle='off', reading a "
        "value imports nothing: import the module there first.",
        "",
    )


def _make_script_function(parts: tuple, allowed: _C._AllowList | None) -> Any:
    is_name = _are(parts, (str,)) and all(part.isidentifier() for part in parts[0].split("."))
    _check_parts(is_name, "ScriptFunction")
    if allowed is not None:
        check_allowed(parts[0], allowed)
    return find_script_function(parts[0], imports=allowed is not None)


def _make_constant(parts: tuple, _: _C._AllowList | None) -> Any:
    _check_parts(_are(parts, (str,)) and parts[0] in CONSTANTS, "constant")
    return CONSTANTS[parts[0]]


def _make_member(parts: tuple, allowed: _C._AllowList | None) -> Any:
    _check_parts(_are(parts, (str, str, str)), "member")
    cls = _find_data_class(parts[0], parts[1], allowed)
    members = cls.__members__ if issubclass(cls, enum.Enum) else {}
    _check_parts(parts[2] in members, "member")
    return members[parts[2]]


def _make_flags(parts: tuple, allowed: _C._AllowList | None) -> Any:
    _check_parts(_are(parts, (str, str, int)), "flags")
    cls: Any = _find_data_class(parts[0], parts[1], allowed)
    value = parts[2]
    _check_parts(issubclass(cls, enum.Flag) and value.bit_length() <= _MOST_FLAG_BITS, "flags")
    if (known := cls._value2member_map_.get(value)) is not None:
        return known
    named = functools.reduce(operator.or_, (member.value for member in cls.__members__.values()), 0)
    unnamed = max(value, ~value) & ~named  # Python 3.10 has negative values: all bits but some
    _check_parts(not unnamed and len(cls._value2member_map_) <= _MOST_FLAGS, "flags")
    return _made(cls, value)


def _make_instance(parts: tuple, allowed: _C._AllowList | None) -> Any:
    _check_parts(_are(parts[:3], (str, str, dict)) and all(type(name) is str for name in parts[2]), "object")
    module, qualified_name, fields, *contents = parts
    cls = _find_data_class(module, qualified_name, allowed)
    # A metaclass or a __new__ of the class does not run.
    _check_parts(not issubclass(cls, (enum.Enum, type, BaseException)), "object")
    if method := _way_of_pickling(cls):
        raise NotAllowedError(
            f"{this_worker()} does not make a {cls.__qualname__} of what others send, because the class has its own "
            f"{method}: send what it is made of.",
            "",
        )
    if allowed is not None and is_listed_class(cls, allowed):
        allowed.record_run(claimed_name(cls))
    if _is_named_tuple(cls):
        _check_parts(fields.keys() == set(cls._fields) and not contents, "NamedTuple")  # type: ignore[attr-defined]
        return cls(**fields)
    if dataclasses.is_dataclass(cls):
        known = dataclasses.fields(cls)
        _check_parts(fields.keys() == {field.name for field in known} and not contents, "dataclass")
        made: Any = cls(**{field.name: fields[field.name] for field in known if field.init})
        for field in known:
            if not field.init:
                object.__setattr__(made, field.name, fields[field.name])
        return made
    slots = _slots_of(cls)
    attributes = {name: value for name, value in fields.items() if name not in slots}
    if (hidden := hidden_name(cls, attributes)) is not None:
        raise _hidden(cls, hidden)
    base = _BASES[_base_of(cls)]
    _check_parts(_are(tuple(contents), base.kinds), cls.__qualname__)
    plain = _made(base.make, cls, *contents)
    if attributes:
        _check_parts(type(getattr(plain, "__dict__", None)) is dict, cls.__qualname__)
        object.__getattribute__(plain, "__dict__").update(attributes)
    for name, value in fields.items():
        if name in slots:
            slots[name].__set__(plain, value)
    return plain


def _find_data_class(module: str, qualified_name: str, allowed: _C._AllowList | None) -> type:
    """Return the class of that name if it is registered or listed here. For another name, nothing is imported."""
    name = f"{'__main__' if module == '__mp_main__' else module}.{qualified_name}"
    if (found := FREE_CLASSES.get(name)) in _SENT_WITHOUT_NAMES:
        return found
    if found := _data_classes.get(name):
        return found
    if allowed is not None:
        found = find_listed(module, qualified_name, allowed)
        if isinstance(found, type) and is_listed_class(found, allowed):
            return found
        raise refused(name, allowed)
    raise NotAllowedError(
        f"{this_worker()} knows no data class {shortened(name)}: decorate it there, too, with rpc.register_data_class, "
        "in a module that is loaded there, or list it in allowed_functions.",
        "",
    )


def find_exception_type(module: str, name: str, allowed: _C._AllowList | None) -> type:
    """Return a class of Python's or torchrpc's exceptions, or a registered or listed class."""
    return FREE_CLASSES.get(f"{module}.{name}") or _find_data_class(module, name, allowed)


def _make_exception(parts: tuple, allowed: _C._AllowList | None) -> Any:
    _check_parts(_are(parts, (str, str, tuple, dict, dict)), "exception")
    module, name, args, fields, attributes = parts
    cls = find_exception_type(module, name, allowed)
    are_parts = are_fields(cls, fields) and are_fields(Exception, attributes) and not _pickling_of_exception(cls)
    _check_parts(issubclass(cls, Exception) and are_parts, "exception")
    names = [name for name, value in attributes.items() if not is_notes(name, value)]
    if (hidden := hidden_name(cls, names)) is not None:
        raise _hidden(cls, hidden)
    made = _made(instance, cls, args)
    _made(set_state, made, attributes, fields)
    return made


def _hidden(cls: type, name: str) -> NotAllowedError:
    return NotAllowedError(
        f"{this_worker()} does not let others set the attribute {shortened(name)} of a {cls.__qualname__}: the name "
        "has a meaning for Python, or belongs to a method or a property of the class.",
        "",
    )


_MAKERS_OF_CLASSES: dict[str, Callable[[tuple, _C._AllowList | None], Any]] = {
    "global": _make_global,
    "ScriptFunction": _make_script_function,
    "constant": _make_constant,
    "member": _make_member,
    "flags": _make_flags,
    "object": _make_instance,
    "exception": _make_exception,
}
