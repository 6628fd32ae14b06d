"""Functions and classes that other workers cannot find by name: those of a notebook or an interactive session.

They are sent by value with cloudpickle, an optional package. The values of the global variables that they use are sent
with them; the receiver has copies of these. Any thread may call these functions.
"""

import functools
import importlib.util
import io
import pickle
import sys
import types
from typing import Any, TypeVar, cast

from .names import has_name

_PicklerClass = TypeVar("_PicklerClass", bound="type[pickle.Pickler]")

# Set when an object arrives by value, so that this worker can send it on, and send back instances of its class.
_has_arrived = False


@functools.cache
def _has_cloudpickle() -> bool:
    return importlib.util.find_spec("cloudpickle") is not None


def is_main_by_value() -> bool:
    """Whether functions and classes of `__main__` are sent by value.

    The main module of a script has a file, from which other workers may have loaded the same functions. The main module
    of a notebook, an interactive session or `python -c` has none.
    """
    return not hasattr(sys.modules["__main__"], "__file__") and _has_cloudpickle()


def note_arrival() -> None:
    """Record that an object has arrived by value: this worker then sends such objects by value, too."""
    global _has_arrived
    _has_arrived = True


def _is_by_value(obj: Any) -> bool:
    if obj.__module__ == "builtins":
        return isinstance(obj, type) and not has_name(obj)  # the type of code objects, for example
    if obj.__module__ != "__main__":
        return False
    # A function that has arrived by value is not in this worker's own main module.
    is_own = isinstance(obj, types.FunctionType) and obj.__globals__ is vars(sys.modules["__main__"])
    return is_main_by_value() or not (is_own or has_name(obj))


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the global variables that are sent with the function."""
    if not (is_main_by_value() or _has_arrived) or not _is_by_value(function):
        return {}
    return {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}


def by_value(kind: _PicklerClass) -> _PicklerClass:
    """Return a subclass of this pickler class that sends functions and classes by value where necessary; the class
    itself if there are none.
    """
    if not (_has_arrived or is_main_by_value()):
        return kind
    return cast(_PicklerClass, _subclass(cast(Any, kind)))


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return NotImplemented


def dumps(obj: Any) -> bytes:
    """Like `pickle.dumps`, but send functions and classes by value where other workers cannot find them by name."""
    file = io.BytesIO()
    by_value(_PlainPickler)(file).dump(obj)
    return file.getvalue()


@functools.cache
def _subclass(kind: Any) -> Any:
    import cloudpickle  # type: ignore[import-untyped]

    class ByValue(kind, cloudpickle.Pickler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.cells_of_code: set[int] = set()  # ids of cells of functions that are not sent by value

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CellType) and id(obj) not in self.cells_of_code:
                return NotImplemented  # cloudpickle reduces it
            if isinstance(obj, (type, types.FunctionType)):
                if _is_by_value(obj):
                    return cloudpickle.Pickler.reducer_override(self, obj)
                if isinstance(obj, types.FunctionType):
                    self.cells_of_code.update(map(id, obj.__closure__ or ()))
            return super().reducer_override(obj)

    return ByValue
