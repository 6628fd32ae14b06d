"""Python objects as bytes and tensors: pickle protocol 5, with tensors and large buffers beside the bytes.

The pickler also handles RRefs, script modules, and functions that have no name in a module (lambdas, nested functions),
which travel as code. `_by_value` sends the functions and classes of notebooks. Any thread may pickle, also within a
__getstate__: each use creates its own pickler.
"""

import enum
import io
import marshal
import operator
import pickle
import struct
import sys
import types
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any

import torch

from torchrpc import _C

from .._errors import SerializationError, also
from .by_value import by_value, globals_of, note_arrival
from .exceptions import make_exception
from .names import find_global, find_module, find_script_function, has_name, this_worker
from .quantized import make_packed, parts_of_packed

# A smaller buffer costs less in the pickle than as a tensor of its own.
_OUT_OF_BAND_BYTES = 4096
_COUNT = struct.Struct("<I")

_Reducer = Callable[[Any], tuple]

# Python 3.11.0 to 3.11.3 pickle a member of an enum as a call of getattr, which no allow-list allows.
_ENUM_REDUCERS = (enum.Enum.__reduce_ex__, enum.Flag.__reduce_ex__)


# --- Functions that a pickle calls by name when it is read ---


def _tensor(index: int) -> torch.Tensor:
    """Never runs in an RPC: `_Unpickler.find_class` replaces it by a look-up in its tensors."""
    raise pickle.UnpicklingError("This was pickled for an RPC message and can only be read there.")


def _rref(fork: tuple) -> _C.PyRRef:
    return _C.PyRRef._deserialize(fork)


def _untyped_storage(data: torch.Tensor) -> torch.UntypedStorage:
    return data.untyped_storage()


def _script_module(data: bytes) -> torch.jit.ScriptModule:
    return torch.jit.load(io.BytesIO(data))


def _operator(name: str) -> Any:
    """Return the object of `torch.ops` with a name such as "aten.add.Tensor"."""
    return operator.attrgetter(name)(torch.ops)


def _empty_cell() -> types.CellType:
    return types.CellType()


def _function(code: bytes, python: str, module: str, name: str, cells: tuple) -> types.FunctionType:
    if python != sys.implementation.cache_tag:
        raise RuntimeError(
            f"The function {name} of module {module} arrived as code of {python}, but {this_worker()} runs "
            f"{sys.implementation.cache_tag}. Lambdas and nested functions need the same Python on both sides: use a "
            "function that has a name at the top level of a module."
        )
    return types.FunctionType(marshal.loads(code), vars(find_module(module)), name, None, cells or None)


def _fill_function(function: types.FunctionType, state: dict) -> None:
    for cell, *content in state["cells"]:
        if content:
            cell.cell_contents = content[0]
    function.__dict__.update(state["dict"])
    for name, value in state["attributes"].items():
        setattr(function, name, value)


_ATTRIBUTES = ("__defaults__", "__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__")


class _Pickler(pickle.Pickler):
    """Writes one object to `file`; appends its tensors and large buffers to the given lists."""

    def __init__(
        self,
        file: io.BytesIO,
        reducers: dict[type, _Reducer],
        tensors: list[torch.Tensor],
        buffers: list[torch.Tensor],
    ) -> None:
        def is_in_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _OUT_OF_BAND_BYTES or raw.readonly:
                return True
            buffers.append(torch.frombuffer(raw, dtype=torch.uint8))
            return False

        super().__init__(file, protocol=5, buffer_callback=is_in_band)
        self.reducers = reducers
        self.tensors = tensors

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor:
            if (parts := parts_of_packed(obj)) is not None:
                return make_packed, parts
            self.tensors.append(obj)
            return _tensor, (len(self.tensors) - 1,)
        if kind is types.FunctionType:
            return NotImplemented if has_name(obj) else _reduce_function(obj)
        if kind is types.CellType:
            return _empty_cell, ()  # _fill_function fills it, because the cell may hold this very function
        if issubclass(kind, enum.Enum) and kind.__reduce_ex__ in _ENUM_REDUCERS:
            return kind, (obj._value_,)
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and not obj.flags.writeable:
            return obj.copy().__reduce_ex__(5)  # the receiver gets a writable array, as in torch's RPC
        if kind in self.reducers:
            return self.reducers[kind](obj)
        if issubclass(kind, _C.PyRRef):
            return self.reduce_rref(obj)
        if issubclass(kind, torch.jit.ScriptModule):
            return _reduce_script_module(obj)
        if kind is torch.UntypedStorage:
            return _untyped_storage, (torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj),)
        if kind is torch.jit.ScriptFunction:
            return find_script_function, (obj.qualified_name,)
        if kind in (torch._ops.OpOverload, torch._ops.OpOverloadPacket):
            return _operator, (str(obj),)
        return NotImplemented

    def reduce_rref(self, rref: _C.PyRRef) -> tuple:
        return _rref, (rref._serialize(),)


class _Probe(_Pickler):
    """Tests whether an object can be pickled; makes no forks of RRefs."""

    def reduce_rref(self, rref: _C.PyRRef) -> tuple:
        return _rref, ((),)


class _Unpickler(pickle.Unpickler):
    """Reads the bytes that `_Pickler` wrote, and takes tensors and buffers from the list."""

    def __init__(self, data: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data), buffers=_buffers(data, tensors))
        self.tensor_at = tensors.__getitem__

    def find_class(self, module: str, name: str) -> Any:
        if name == "_tensor" and module == __name__:
            return self.tensor_at
        if module == "cloudpickle.cloudpickle":
            note_arrival()
        return find_global(module, name)


def _buffers(data: bytes, tensors: list[torch.Tensor]) -> Iterator[Any]:
    """Return the buffers, the last tensors of the list, as writable views of the tensors' memory."""
    (count,) = _COUNT.unpack_from(data, len(data) - _COUNT.size)
    return (memoryview(tensor.numpy()) for tensor in tensors[len(tensors) - count :])


def _reduce_function(function: types.FunctionType) -> tuple:
    """Reduce a function to code, closure, defaults and attributes. Its globals are those of the receiver's module."""
    cells = function.__closure__ or ()
    arguments = (
        marshal.dumps(function.__code__),
        sys.implementation.cache_tag,
        function.__globals__.get("__name__", "__main__"),
        function.__name__,
        cells,
    )
    state = {
        "cells": [(cell, *_cell_content(cell)) for cell in cells],
        "dict": function.__dict__,
        "attributes": {name: getattr(function, name) for name in _ATTRIBUTES},
    }
    return _function, arguments, state, None, None, _fill_function


def _reduce_script_module(module: torch.jit.ScriptModule) -> tuple:
    file = io.BytesIO()
    try:
        torch.jit.save(module, file)
    except torch.jit.Error as exc:  # raised by the module's __getstate__
        raise RuntimeError(str(exc)) from exc
    return _script_module, (file.getvalue(),)


def _cell_content(cell: types.CellType) -> tuple:
    """Return a tuple of the cell's value; empty if none has been assigned yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


class _InternalRPCPickler:
    """Turns objects into bytes and tensors, and back. Thread-safe; subclasses may override both methods."""

    def __init__(self) -> None:
        self._reducers: dict[type, _Reducer] = {}

    def _register_reducer(self, obj_class: type, reducer: _Reducer) -> None:
        """Pickle instances of exactly this class by `reducer(obj)`, which returns a tuple as `__reduce__` does."""
        self._reducers.setdefault(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Return the bytes and the tensors that make up `obj`.

        The tensors are the objects of exactly the type torch.Tensor, of any shape and dtype, then the large buffers as
        one-dimensional uint8 tensors. Nothing is copied: the receiver may see changes that are made before the message
        is sent.

        Raises:
            RuntimeError: `obj` contains an RRef that has been deleted, or a future.
            TypeError, AttributeError, pickle.PicklingError: something else in `obj` cannot be pickled.
        """
        return self._dump(_Pickler, obj)

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Return the object that `serialize` was given. Large buffers are writable views of their tensors' memory.

        Raises:
            AttributeError, ModuleNotFoundError: this worker does not have a function, class or module of that name (the
                errors are RuntimeErrors, too).
        """
        return _Unpickler(binary_data, tensor_table).load()

    def _check(self, obj: Any) -> None:
        """Raise the error that serialize() would raise for `obj`, if any."""
        self._dump(_Probe, obj)

    def _dump(self, pickler: type[_Pickler], obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        file = io.BytesIO()
        tensors: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        by_value(pickler)(file, self._reducers, tensors, buffers).dump(obj)
        file.write(_COUNT.pack(len(buffers)))  # the unpickler stops before these bytes
        return file.getvalue(), tensors + buffers


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return the bytes and tensors of a result. Raises the errors of the pickler's method, with the worker's name and
    advice.
    """
    try:
        return _internal_rpc_pickler.serialize(obj)
    except Exception as exc:
        advice = (
            "Return plain data, tensors or picklable objects; call the function with rpc.remote() to leave its result "
            "where it is."
        )
        if isinstance(obj, (Generator, AsyncGenerator)):
            advice = (
                f"Return a list of its items, or call the function with rpc.remote(), which leaves the generator on "
                f"{this_worker()}, and take the items there, in functions that get the RRef."
            )
        raise make_exception(
            also(SerializationError, type(exc)),
            f"{this_worker()} cannot send a value of type {type(obj).__qualname__}: {exc}. {advice}",
        ) from exc


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Return the object that `serialize` was given on another worker."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _arguments_by_name(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {f"argument {key}": value for key, value in [*enumerate(args), *kwargs.items()]}


def refuse_rrefs(to: str, function: str, args: tuple, kwargs: dict) -> None:
    """Raise SerializationError if an argument for a script function is an RRef."""
    for name, value in _arguments_by_name(args, kwargs).items():
        if isinstance(value, _C.PyRRef):
            raise SerializationError(
                f"Cannot send {name} (RRef) of the call of {function} to {to}: TorchScript cannot hold RRefs of "
                "torchrpc. Call a Python function, and the script function there with the value."
            )


def _find_captured(function: Any, seen: tuple[Any, ...] = ()) -> tuple[str, Any, Exception] | None:
    """Find a value that a function which travels as code captures, and that cannot be pickled.

    Return a phrase that names the value, the value itself, and its error; None if there is no such value.
    """
    if type(function) is not types.FunctionType or any(function is each for each in seen):
        return None
    if has_name(function) and not globals_of(function):
        return None
    variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = [(f"the variable {name!r}", content) for name, cell in variables for content in _cell_content(cell)]
    values += [(f"the global variable {name!r}", value) for name, value in globals_of(function).items()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for phrase, value in [*values, *(("a default of a parameter", default) for default in defaults)]:
        try:
            _internal_rpc_pickler._check(value)
        except Exception as why:
            return _find_captured(value, (*seen, function)) or (f"{phrase} of {function.__qualname__}", value, why)
    return None


def raise_unsendable(exc: Exception, to: str, func: Any, args: tuple, kwargs: dict) -> None:
    """Raise `exc`, which occurred while a call was encoded. If an argument caused it, or a variable that a function
    captures, raise an error that names it.
    """
    function = getattr(func, "__qualname__", repr(func))
    for name, value in {"the function": func, **_arguments_by_name(args, kwargs)}.items():
        try:
            _internal_rpc_pickler._check(value)
        except Exception as why:
            part, cause = f"{name} ({type(value).__qualname__})", why
            if captured := _find_captured(value):
                phrase, content, cause = captured
                part = f"{name}, because of {phrase} (a {type(content).__qualname__}),"
            raise make_exception(
                also(SerializationError, type(cause)),
                f"Cannot send {part} of the call of {function} to {to}: {cause}. Nothing was sent. Use plain data, "
                f"tensors or picklable objects, or create it on {to} with rpc.remote().",
            ) from exc
    raise exc
