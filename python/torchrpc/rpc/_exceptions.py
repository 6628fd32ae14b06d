"""Exceptions on their way from the callee to the caller: described on the callee, rebuilt with type and text on the
caller.

Both run on threads of the pool, or on the thread that waits for the call.
"""

import contextlib
import io
import pickle
import re
import sys
import traceback
from typing import Any

from torchrpc import _C

from ._allow_list import find_exception

_TYPE_NOT_RESTORED = (
    "Failed to create original exception type. Error msg was {why} Original exception on remote side was {text}"
)


class WorkerLostError(RuntimeError):
    """A worker with outstanding requests has died, is stopped or cannot be reached; the text says which, and why.

    Raised by everything that depends on the worker: calls, RRefs that it owns, backward passes, optimizer steps,
    `shutdown`.

    Attributes:
        worker (str): the name of the lost worker.
    """

    __module__ = "torchrpc.rpc"

    def __init__(self, text: str, worker: str = "") -> None:
        super().__init__(text)
        self.worker = worker


class _Text(str):
    """A message whose repr is the message itself.

    KeyError prints the repr of its argument. With a plain str, each level of nested errors would escape the line breaks
    of the level below.
    """

    def __repr__(self) -> str:
        return str(self)

    __str__ = str.__str__


def _repr_with_line_breaks(exc: BaseException) -> str:
    return re.sub(r"\\(\\|n)", lambda match: "\n" if match[1] == "n" else match[0], repr(exc))


def _describe_exception(exc: BaseException) -> tuple[str, bytes]:
    """On the callee: return the text for the caller, and the bytes that `_rebuild_exception` needs. Print the text to
    stderr.

    Never raises. The bytes are empty if the type cannot be pickled by name.
    """
    try:
        shown, trace = _repr_with_line_breaks(exc), "".join(traceback.format_exception(exc))
    except Exception as broken:  # raised by a __repr__ or __str__ of the user's
        shown, trace = f"{type(exc).__name__} (its repr failed: {type(broken).__name__})", ""
    where = _C._get_current_rpc_agent().get_worker_info() if _C._is_current_rpc_agent_set() else "a stopped worker"
    text = f"On {where}:\n{shown}\n{trace}"
    text = text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate is no UTF-8
    with contextlib.suppress(Exception):  # stderr may be closed
        print(text, file=sys.stderr)
    try:
        return text, pickle.dumps((type(exc), _picklable_attributes(exc)))
    except Exception as why:
        return f"{text}\nThe caller gets a RuntimeError instead of a {type(exc).__qualname__}: {why}", b""


def _picklable_attributes(exc: BaseException) -> dict[str, Any]:
    state = {}
    for name, value in vars(exc).items():
        try:
            pickle.loads(pickle.dumps(value))
        except Exception:
            continue
        state[name] = value
    return state


def _rebuild_exception(text: str, detail: bytes, worker_name: str, also_runtime_error: bool = False) -> BaseException:
    """On the caller: return an exception of the type raised on `worker_name`, with its attributes, whose str() is
    `text`.

    If the constructor of the type needs more than a text, the result is an instance of a subclass of the type that is
    also a RuntimeError (torch's RPC raises RuntimeError then); with `also_runtime_error` it always is. If the type
    cannot be imported here, or is no Exception, the result is a RuntimeError that says why. If `detail` is empty, it is
    a RuntimeError with `text`.
    """
    text = _Text(text)
    if not detail:
        return RuntimeError(text)
    try:
        cls, state = _TypeUnpickler(detail).load()
        if not issubclass(cls, Exception):
            raise TypeError(f"{cls.__name__} is not an Exception.")
        exc = _make_runtime_error_subclass(cls, text) if also_runtime_error else make_exception(cls, text)
        vars(exc).update(state)
        return exc
    except Exception as why:
        return RuntimeError(_TYPE_NOT_RESTORED.format(why=f"{why} (raised on {worker_name})", text=text))


def make_exception(cls: type[BaseException], text: str) -> Any:
    """Return an exception of type `cls` whose str() contains `text`, for any signature of the constructor of `cls`.

    If `cls(text)` fails or drops the text, the result is an instance of a subclass of `cls` and RuntimeError.
    """
    text = _Text(text)
    try:
        exc = cls(text)
        if text in str(exc):
            return exc
        why: Any = "its constructor drops the text."
    except Exception as failed:
        why = failed
    return _make_runtime_error_subclass(cls, _TYPE_NOT_RESTORED.format(why=why, text=text))


def _make_runtime_error_subclass(cls: type[BaseException], text: str) -> Any:
    """Return an instance of a new subclass of `cls` and RuntimeError whose str() is `text`; no constructor runs."""
    text = _Text(text)
    bases = (cls,) if issubclass(cls, RuntimeError) else (cls, RuntimeError)
    if cls is Exception:
        bases = (RuntimeError,)
    described = type(cls.__name__, bases, {"__module__": cls.__module__, "__str__": lambda self: text})
    return described.__new__(described, text)


class _TypeUnpickler(pickle.Unpickler):
    """Reads the detail of an exception; a worker with `allowed_functions` builds only the types that they allow."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        return find_exception(module, name)
