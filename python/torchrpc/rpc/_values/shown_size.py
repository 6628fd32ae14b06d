"""How long a text would be that shows a value. A few received bytes can refer to the same parts very often."""

import gc
import types
from typing import Any

import torch

from .exception_parts import members_of

_NOT_SHOWN = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.TracebackType, torch.Tensor)
_WITHOUT_PARTS = (str, bytes, bytearray, int, float, complex, type(None))


def is_shown_small(value: Any, most: int) -> bool:
    """Whether a text that shows this value has about `most` characters at most: it shows a part again wherever the part
    occurs. No code of the program runs, and the time is in proportion to the number of parts.
    """
    sizes: dict[int, int] = {}
    todo: list[tuple[Any, list[Any] | None]] = [(value, None)]
    left = most
    while todo:
        each, parts = todo.pop()
        if parts is not None:
            sizes[id(each)] = min(most + 1, _own_size(each) + sum(sizes[id(part)] for part in parts))
        elif id(each) not in sizes:
            parts = _parts_of(each)
            left -= 1 + len(parts)
            if left < 0:
                return False
            sizes[id(each)] = 0  # if the value contains itself, "..." is shown
            todo.append((each, parts))
            todo += [(part, None) for part in parts if id(part) not in sizes]
    return sizes[id(value)] <= most


def _own_size(value: Any) -> int:
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    return value.bit_length() // 3 if type(value) is int else 1


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, BaseException):
        notes = vars(value).get("__notes__")
        return [value.args, value.__cause__, value.__context__, notes, *members_of(value).values()]
    if isinstance(value, _WITHOUT_PARTS):
        return []
    return [part for part in gc.get_referents(value) if not isinstance(part, _NOT_SHOWN)]
