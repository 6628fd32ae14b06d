"""Plain data in the pickles that a worker with `allowed_functions` receives: the names that may occur, and
constructors. A constructor checks its arguments, because a peer may have sent anything. `_limited_unpickler` reads the
pickles. Threads: any.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import pathlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from torchrpc import _C

from . import _errors

_MOST_FRACTION_BITS = 1 << 16
_MOST_DECIMAL_DIGITS = 10_000
_MOST_DECIMAL_EXPONENT = 999_999  # the limit of decimal's default contexts; such an int has half a megabyte


class Reader(Protocol):
    """The methods of the reader of a pickle that constructors use."""

    def checked_keys(self, keys: list[Any]) -> list[Any]: ...
    def check_callable(self, function: Any) -> None: ...
    def charge(self, effort: int) -> None: ...


Construct = Callable[[Any, tuple], Any]  # from a reader and the arguments in its pickle


class MalformedError(Exception):
    """The received bytes are not a pickle, or contain values that no pickler writes. Becomes a SerializationError."""


class StandIn:
    """A placeholder for a function or an object that must not become a value. It does nothing by itself."""

    __slots__ = ("construct", "name")

    def __init__(self, name: str, construct: Callable[..., Any] | None) -> None:
        self.name = name
        self.construct = construct


def are(values: Sequence[Any], *kinds: type) -> bool:
    return len(values) == len(kinds) and all(type(value) is kind for value, kind in zip(values, kinds, strict=True))


def require(condition: Any, what: str) -> None:
    if not condition:
        raise MalformedError(f"its arguments for {what} are not those that a pickler writes")


def _make_complex(_: Reader, args: tuple) -> complex:
    require(are(args, float, float), "complex")
    return complex(*args)


def _make_range(_: Reader, args: tuple) -> range:
    require(are(args, int, int, int), "range")
    return range(*args)


def _make_slice(_: Reader, args: tuple) -> slice:
    require(len(args) == 3, "slice")
    return slice(*args)


def _make_bytes(_: Reader, args: tuple) -> bytes:  # protocol 2 writes only empty bytes like this
    require(not args, "bytes")
    return b""


def _make_bytearray(_: Reader, args: tuple) -> bytearray:
    require(not args or are(args, bytes), "bytearray")
    return bytearray(*args)


def _make_set(reader: Reader, args: tuple) -> set:  # protocols 2 and 3
    require(are(args, list), "set")
    return set(reader.checked_keys(args[0]))


def _make_frozenset(reader: Reader, args: tuple) -> frozenset:
    require(are(args, list), "frozenset")
    return frozenset(reader.checked_keys(args[0]))


def _encode(_: Reader, args: tuple) -> bytes:  # protocol 2 writes bytes like this
    require(are(args, str, str) and args[1] == "latin1", "_codecs.encode")
    return args[0].encode("latin1")


def _type_of_constant(_: Reader, args: tuple) -> type:
    require(len(args) == 1 and any(args[0] is constant for constant in (None, ..., NotImplemented)), "type")
    return type(args[0])


def _make_ordered_dict(_: Reader, args: tuple) -> collections.OrderedDict:
    require(not args, "OrderedDict")
    return collections.OrderedDict()


def _make_deque(_: Reader, args: tuple) -> collections.deque:
    require(not args or are(args, tuple) or (are(args, tuple, int) and args[1] >= 0), "deque")
    return collections.deque(*args)


def _make_counter(_: Reader, args: tuple) -> collections.Counter:
    require(are(args, dict), "Counter")
    counter: collections.Counter = collections.Counter()
    dict.update(counter, args[0])
    return counter


def _make_defaultdict(reader: Reader, args: tuple) -> collections.defaultdict:
    require(len(args) <= 1, "defaultdict")
    if args and args[0] is not None and not any(args[0] is kind for kind in _FACTORIES):
        reader.check_callable(args[0])
    return collections.defaultdict(*args)


def _make_date(_: Reader, args: tuple) -> datetime.date:
    require(are(args, bytes) and len(args[0]) == 4, "date")
    return datetime.date(*args)


def _is_time_zone(values: tuple) -> bool:
    return not values or (len(values) == 1 and issubclass(type(values[0]), datetime.tzinfo))


def _make_datetime(_: Reader, args: tuple) -> datetime.datetime:
    require(are(args[:1], bytes) and len(args[0]) == 10 and _is_time_zone(args[1:]), "datetime")
    return datetime.datetime(*args)


def _make_time(_: Reader, args: tuple) -> datetime.time:
    require(are(args[:1], bytes) and len(args[0]) == 6 and _is_time_zone(args[1:]), "time")
    return datetime.time(*args)


def _make_timedelta(_: Reader, args: tuple) -> datetime.timedelta:
    require(are(args, int, int, int), "timedelta")
    return datetime.timedelta(*args)


def _make_timezone(_: Reader, args: tuple) -> datetime.timezone:
    require(are(args, datetime.timedelta) or are(args, datetime.timedelta, str), "timezone")
    return datetime.timezone(*args)


def _make_decimal(_: Reader, args: tuple) -> decimal.Decimal:
    require(are(args, str) and len(args[0]) <= _MOST_DECIMAL_DIGITS, "Decimal")
    number = decimal.Decimal(*args)
    require(not number.is_finite() or abs(number.adjusted()) <= _MOST_DECIMAL_EXPONENT, "Decimal")
    return number


def _make_fraction(reader: Reader, args: tuple) -> fractions.Fraction:
    if are(args, str):  # before Python 3.12. Fraction also accepts "1e999999999"; this does not
        parts = args[0].split("/")
        require(len(parts) <= 2 and len(args[0]) < _MOST_DECIMAL_DIGITS, "Fraction")
        require(all(part.removeprefix("-").isdecimal() for part in parts), "Fraction")
        args = tuple(map(int, parts))
    require(are(args, int) or are(args, int, int), "Fraction")
    require(all(arg.bit_length() <= _MOST_FRACTION_BITS for arg in args), "Fraction")
    # The greatest common divisor takes time in proportion to the square of the bits.
    reader.charge(sum(arg.bit_length() ** 2 for arg in args) >> 14)
    return fractions.Fraction(*args)


def _build_uuid(state: Any) -> uuid.UUID:
    require(type(state) is dict and state.keys() <= {"int", "is_safe"} and type(state.get("int")) is int, "UUID")
    safe = state.get("is_safe", uuid.SafeUUID.unknown.value)
    require(safe is None or type(safe) is int, "UUID")
    return uuid.UUID(int=state["int"], is_safe=uuid.SafeUUID(safe))


def _build_worker_info(state: Any) -> _C.WorkerInfo:
    require(type(state) is tuple and are(state, str, int), "WorkerInfo")
    return _C.WorkerInfo(*state)


def _make_path(kind: type[pathlib.PurePath]) -> Construct:
    def make(_: Reader, args: tuple) -> pathlib.PurePath:
        require(all(type(arg) is str for arg in args), kind.__name__)
        return kind(*args)

    return make


def _make_size(_: Reader, args: tuple) -> torch.Size:
    require(are(args, tuple) and all(type(size) is int for size in args[0]), "torch.Size")
    return torch.Size(*args)


def _make_device(_: Reader, args: tuple) -> torch.device:
    require(are(args, str) or are(args, str, int), "torch.device")
    return torch.device(*args)


def _get_layout(_: Reader, args: tuple) -> torch.layout:
    require(are(args, str) and args[0] in _LAYOUTS, "torch.layout")
    return _LAYOUTS[args[0]]


def _make_parameter(_: Reader, args: tuple) -> torch.nn.Parameter:
    # No hooks: they are functions that backward passes call.
    require(are(args, torch.Tensor, bool, collections.OrderedDict) and not args[2], "Parameter")
    return torch.nn.Parameter(args[0], args[1])


def _make_error(kind: type[Exception]) -> Construct:
    def make(_: Reader, args: tuple) -> Exception:
        require(len(args) <= 2, kind.__name__)
        return kind(*args)

    return make


_LAYOUTS: dict[str, torch.layout] = {str(value): value for value in vars(torch).values() if type(value) is torch.layout}
_ERROR_CLASSES = [kind for kind in vars(_errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
_FACTORIES = (*(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple), *(
    collections.OrderedDict, collections.deque, collections.Counter))  # fmt: skip

# Name -> the object. Building it calls nothing that the pickle contains.
DATA: dict[str, Any] = {
    **{f"builtins.{kind.__name__}": kind for kind in (*_FACTORIES[:12], object, range, slice)},
    **{f"builtins.{name}": getattr(builtins, name) for name in ("Ellipsis", "NotImplemented")},
    **{
        f"{kind.__module__}.{kind.__qualname__}": kind
        for kind in (
            *(collections.OrderedDict, collections.deque, collections.Counter, collections.defaultdict),
            *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
            *(decimal.Decimal, fractions.Fraction, uuid.UUID),
            *(torch.Size, torch.device, torch.Tensor, torch.nn.Parameter),
            *_ERROR_CLASSES,
        )
    },
    "torchrpc._C.WorkerInfo": _C.WorkerInfo,
    "builtins.type": StandIn("builtins.type", _type_of_constant),
    "_codecs.encode": StandIn("_codecs.encode", _encode),
    "torch.serialization._get_layout": StandIn("torch.serialization._get_layout", _get_layout),
    "torch._utils._rebuild_parameter": StandIn("torch._utils._rebuild_parameter", _make_parameter),
    # Pickles refer to memory formats by these names.
    **{f"torch._utils.{value}": value for value in vars(torch).values() if type(value) is torch.memory_format},
    **{
        f"torch.{name}": value
        for name, value in vars(torch).items()
        if type(value) in (torch.dtype, torch.layout, torch.memory_format)
    },
}
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))
for _kind in _PATHS:
    DATA[f"pathlib.{_kind.__name__}"] = DATA[f"{_kind.__module__}.{_kind.__name__}"] = _kind

CONSTRUCTORS: dict[int, Construct] = {
    id(kind): construct
    for kind, construct in (
        *((complex, _make_complex), (range, _make_range), (slice, _make_slice)),
        *((bytes, _make_bytes), (bytearray, _make_bytearray), (set, _make_set), (frozenset, _make_frozenset)),
        *((collections.OrderedDict, _make_ordered_dict), (collections.deque, _make_deque)),
        *((collections.Counter, _make_counter), (collections.defaultdict, _make_defaultdict)),
        *((datetime.date, _make_date), (datetime.datetime, _make_datetime), (datetime.time, _make_time)),
        *((datetime.timedelta, _make_timedelta), (datetime.timezone, _make_timezone)),
        *((decimal.Decimal, _make_decimal), (fractions.Fraction, _make_fraction)),
        *((torch.Size, _make_size), (torch.device, _make_device)),
        *((kind, _make_path(kind)) for kind in _PATHS),
        *((kind, _make_error(kind)) for kind in _ERROR_CLASSES),
    )
}
BUILT_BY_STATE: dict[int, Callable[[Any], Any]] = {
    id(uuid.UUID): _build_uuid,
    id(_C.WorkerInfo): _build_worker_info,
}
WITH_ATTRIBUTES = (collections.OrderedDict, *_ERROR_CLASSES)  # state dicts of modules have the attribute _metadata
MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
SEQUENCES = (list, collections.deque)
PLAIN_KEYS = frozenset([str, int, bool, float, bytes, type(None), complex])
