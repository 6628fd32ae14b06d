"""The kinds of values of Python, torch and NumPy that travel without pickle and belong to no class of a program: of
which parts each is made, and the classes and constants that may be sent by name.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import pathlib
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchrpc import _C

from .. import _errors
from .._security.allow_list import claimed_name
from .arrays import make_array, make_dtype, make_scalar
from .quantized import check_packed, make_packed

_MOST_RANGE_BITS = 1 << 10  # the length of a range takes time in proportion to the square of the bits
_MOST_FRACTION_BITS = 1 << 13  # the same holds for the greatest common divisor of numerator and denominator
_MOST_DECIMAL_DIGITS = 10_000
_MOST_DECIMAL_EXPONENT = 999_999  # the limit of decimal's default contexts; such an int has half a megabyte

Make = Callable[..., Any]  # from the parts
Lower = Callable[[Any], tuple]  # to the parts


class Maker(NamedTuple):
    make: Make
    kinds: tuple[type, ...] | None  # the types of the parts; None: `make` checks them


LOWERS: dict[type, tuple[str, Lower]] = {}  # by the exact type of the value
MAKERS: dict[str, Maker] = {}


def _kind(cls: type, kinds: tuple[type, ...] | None, lower: Lower, make: Make | None = None, name: str = "") -> None:
    name = name or cls.__name__
    LOWERS[cls] = name, lower
    MAKERS[name] = Maker(make or cls, kinds)


def require(condition: Any, what: str) -> None:
    if not condition:
        raise ValueError(f"the parts of a {what} are not those that are sent")


def _make_range(start: int, stop: int, step: int) -> range:
    require(all(part.bit_length() <= _MOST_RANGE_BITS for part in (start, stop, step)), "range")
    return range(start, stop, step)


def _make_fraction(numerator: int, denominator: int) -> fractions.Fraction:
    require(max(numerator.bit_length(), denominator.bit_length()) <= _MOST_FRACTION_BITS, "Fraction")
    return fractions.Fraction(numerator, denominator)


def _make_slice(*parts: Any) -> slice:
    scalars = (int, float, str, bytes, bool, type(None), torch.Tensor)
    require(len(parts) == 3 and all(type(part) in scalars for part in parts), "slice")
    return slice(*parts)


def _make_with_zone(cls: Any, count: int) -> Make:
    def make(*parts: Any) -> Any:
        *numbers, fold, zone = parts
        are_numbers = len(numbers) == count and all(type(number) is int for number in (*numbers, fold))
        require(are_numbers and (zone is None or issubclass(type(zone), datetime.tzinfo)), cls.__name__)
        return cls(*numbers, zone, fold=fold)

    return make


def _make_timezone(*parts: Any) -> datetime.timezone:
    kinds = [type(part) for part in parts]
    require(kinds in ([datetime.timedelta], [datetime.timedelta, str]), "timezone")
    return datetime.timezone(*parts)


def _make_decimal(text: str) -> decimal.Decimal:
    require(len(text) <= _MOST_DECIMAL_DIGITS, "Decimal")
    number = decimal.Decimal(text)
    require(not number.is_finite() or abs(number.adjusted()) <= _MOST_DECIMAL_EXPONENT, "Decimal")
    return number


def _make_uuid(number: int, is_safe: Any) -> uuid.UUID:
    require(type(number) is int and (is_safe is None or type(is_safe) is int), "UUID")
    return uuid.UUID(int=number, is_safe=uuid.SafeUUID(is_safe))


def _make_size(*sizes: Any) -> torch.Size:
    require(all(type(size) is int for size in sizes), "torch.Size")
    return torch.Size(sizes)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _make_typed_storage(data: torch.Tensor, dtype: torch.dtype) -> torch.TypedStorage:
    storage = data.untyped_storage()
    require(storage.nbytes() % dtype.itemsize == 0, "TypedStorage")
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _make_packed(*parts: Any) -> torch.Tensor:
    check_packed(*parts)
    return make_packed(*parts)


_kind(str, (bytes,), lambda value: (value.encode("utf-8", "surrogatepass"),), name="surrogates",
      make=lambda data: str(data, "utf-8", "surrogatepass"))  # fmt: skip
_kind(bytearray, (bytes,), lambda value: (bytes(value),))
_kind(range, (int, int, int), lambda value: (value.start, value.stop, value.step), _make_range)
_kind(slice, None, lambda value: (value.start, value.stop, value.step), _make_slice)
_kind(datetime.date, (int, int, int), lambda value: (value.year, value.month, value.day))
_kind(datetime.datetime, None, lambda value: (
    *(value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond, value.fold),
    value.tzinfo), _make_with_zone(datetime.datetime, 7))  # fmt: skip
_kind(datetime.time, None, lambda value: (
    *(value.hour, value.minute, value.second, value.microsecond, value.fold), value.tzinfo),
    _make_with_zone(datetime.time, 4))  # fmt: skip
_kind(datetime.timedelta, (int, int, int), lambda value: (value.days, value.seconds, value.microseconds))
_kind(datetime.timezone, None, lambda value: value.__getinitargs__(), _make_timezone)
_kind(decimal.Decimal, (str,), lambda value: (str(value),), _make_decimal)
_kind(fractions.Fraction, (int, int), lambda value: (value.numerator, value.denominator), _make_fraction)
_kind(uuid.UUID, None, lambda value: (value.int, value.is_safe.value), _make_uuid)
for _path in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path())):
    _kind(_path, (str,), lambda value: (str(value),))
_kind(_C.WorkerInfo, (str, int), lambda value: (value.name, value.id))
_kind(torch.Size, None, tuple, _make_size)
_kind(torch.UntypedStorage, (torch.Tensor,), lambda value: (_bytes_of(value),), lambda data: data.untyped_storage())
_kind(torch.TypedStorage, (torch.Tensor, torch.dtype), lambda value: (
    _bytes_of(value._untyped_storage), value.dtype), _make_typed_storage)  # fmt: skip
LOWERS[torch.jit.ScriptFunction] = "ScriptFunction", lambda value: (value.qualified_name,)
MAKERS["dtype"] = Maker(make_dtype, (str,))
MAKERS["array"] = Maker(make_array, (str, tuple, bool, object))
MAKERS["scalar"] = Maker(make_scalar, (str, object))
MAKERS["quantized_packed"] = Maker(_make_packed, None)

CONSTANTS: dict[str, Any] = {
    **{str(value): value for value in (..., NotImplemented)},
    **{kind.__name__: kind for kind in (type(None), type(...), type(NotImplemented))},
    **{
        str(value): value
        for value in vars(torch).values()
        if type(value) in (torch.layout, torch.memory_format, torch.qscheme)
    },
}
NAMES_OF_CONSTANTS = {id(value): name for name, value in CONSTANTS.items()}

# Classes that may be sent by name although no list has them. Calling one of them does no harm.
FREE_CLASSES: dict[str, type] = {
    claimed_name(cls): cls
    for cls in (
        *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, object, range, set, slice, str, tuple),
        *(collections.OrderedDict, collections.deque, collections.Counter, collections.defaultdict),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PurePosixPath, pathlib.PureWindowsPath),
        *(type(pathlib.Path()), torch.Size, torch.device, torch.Tensor, torch.nn.Parameter),
        *(
            each
            for each in (*vars(builtins).values(), *vars(_errors).values())
            if isinstance(each, type) and issubclass(each, Exception)
        ),
    )
}
