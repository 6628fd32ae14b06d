"""Exceptions on their way from the callee to the caller: described there, built again here with type and text.

Both ends run on pool threads, or on the caller's own when it waits.
"""

import contextlib
import functools
import importlib
import io
import pickle
import re
import sys
import traceback
from typing import Any

from torchrpc import _C

_ABOUT_TYPE = (
    "Failed to create original exception type. Error msg was {why} Original exception on remote side was {text}"
)


class WorkerLostError(RuntimeError):
    """A worker that something is awaited of has died, is stopped or cannot be reached; the text says which, and how.

    Raised by what depends on it: calls, RRefs that it owns, backward passes, optimizer steps, `shutdown`. `worker` is
    its name.
    """

    __module__ = "torchrpc.rpc"

    def __init__(self, text: str, worker: str = "") -> None:
        super().__init__(text)
        self.worker = worker


class NameNotFoundError(AttributeError, RuntimeError):
    """This worker has no function or class of the name that arrived."""


class ModuleNotImportableError(ModuleNotFoundError, RuntimeError):
    """This worker cannot import the module of a function or class that arrived."""


class _Text(str):
    """A message whose repr is itself: KeyError prints the repr of what it holds, and nested errors would escape
    each other's line breaks again and again."""

    def __repr__(self) -> str:
        return str(self)

    __str__ = str.__str__


def this_worker() -> str:
    """This worker's name, for messages."""
    return _C._get_current_rpc_agent().get_worker_info().name if _C._is_current_rpc_agent_set() else "this process"


def find_module(name: str) -> Any:
    """The module of that name, imported if need be; `__main__` and `__mp_main__` stand for each other.

    Raises:
        ModuleNotImportableError: with what to do about it.
    """
    if name in ("__main__", "__mp_main__"):
        return sys.modules.get(name) or sys.modules["__main__"]
    try:
        return importlib.import_module(name)  # waits if another thread is just importing it
    except ImportError as exc:
        raise ModuleNotImportableError(
            f"{this_worker()} cannot import the module {name}: {exc}. Functions and classes travel by name: install "
            f"the module on {this_worker()} or put its folder on PYTHONPATH there.",
            name=name,
        ) from exc


def find_global(module: str, qualified_name: str) -> Any:
    """What `module` calls by that (dotted) name.

    Raises:
        ModuleNotImportableError, NameNotFoundError: with what to do about it.
    """
    with contextlib.suppress(KeyError, AttributeError):  # there, or as good as there: in a module being imported
        return functools.reduce(getattr, qualified_name.split("."), sys.modules[module])
    found = find_module(module)
    for part in qualified_name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as exc:
            raise NameNotFoundError(
                f"{this_worker()} has no {qualified_name} in its module {module}: {exc}. The Default RPC pickler does "
                "not serialize functions and classes that have a name in a module, it sends the name. Define it on "
                f"{this_worker()}, too, at the top level of that module, and run the same code on both sides."
            ) from exc
    return found


def _shown(exc: BaseException) -> str:
    """repr(exc) with real line breaks."""
    return re.sub(r"\\(\\|n)", lambda match: "\n" if match[1] == "n" else match[0], repr(exc))


def _describe_exception(exc: BaseException) -> tuple[str, bytes]:
    """On the callee: the text for the caller, also printed to stderr, and what `_rebuild_exception` needs.

    Never fails. The second part is empty if the type cannot be named to others.
    """
    try:
        shown, trace = _shown(exc), "".join(traceback.format_exception(exc))
    except Exception as broken:  # a __repr__ or __str__ of the user's
        shown, trace = f"{type(exc).__name__} (its repr failed: {type(broken).__name__})", ""
    where = _C._get_current_rpc_agent().get_worker_info() if _C._is_current_rpc_agent_set() else "a stopped worker"
    text = f"On {where}:\n{shown}\n{trace}"
    with contextlib.suppress(Exception):  # a closed stderr
        print(text, file=sys.stderr)
    try:
        return text, pickle.dumps((type(exc), _plain_state(exc)))
    except Exception as why:
        return f"{text}\nThe caller gets a RuntimeError instead of a {type(exc).__qualname__}: {why}", b""


def _plain_state(exc: BaseException) -> dict[str, Any]:
    """Those attributes of the exception that can travel."""
    state = {}
    for name, value in vars(exc).items():
        try:
            pickle.loads(pickle.dumps(value))
        except Exception:
            continue
        state[name] = value
    return state


def _rebuild_exception(text: str, detail: bytes, worker_name: str, also_runtime_error: bool = False) -> BaseException:
    """On the caller: an exception of the type raised on `worker_name`, whose str() is `text`, with its attributes.

    A type whose constructor wants more than a text gives an instance of a subclass of it, which is also a RuntimeError
    (what torch's RPC raises then). A type that cannot be had here, or that is no Exception, gives a RuntimeError that
    says why; so does, as it is, an error without `detail`. `also_runtime_error` asks for that subclass always.
    """
    text = _Text(text)
    if not detail:
        return RuntimeError(text)
    try:
        cls, state = _TypeUnpickler(detail).load()
        if not issubclass(cls, Exception):
            raise TypeError(f"{cls.__name__} is not an Exception.")
        exc = _both_types(cls, text) if also_runtime_error else same_type(cls, text)
        vars(exc).update(state)
        return exc
    except Exception as why:
        return RuntimeError(_ABOUT_TYPE.format(why=f"{why} (raised on {worker_name})", text=text))


def same_type(cls: type[BaseException], text: str) -> Any:
    """An exception of type `cls` that says `text`, whatever the constructor of `cls` wants."""
    text = _Text(text)
    try:
        exc = cls(text)
        if text in str(exc):
            return exc
        why: Any = "its constructor drops the text."
    except Exception as failed:
        why = failed
    return _both_types(cls, _ABOUT_TYPE.format(why=why, text=text))


def _both_types(cls: type[BaseException], text: str) -> Any:
    """An instance of a subclass of `cls` and RuntimeError that says `text`; no constructor is called."""
    text = _Text(text)
    bases = (cls,) if issubclass(cls, RuntimeError) else (cls, RuntimeError)
    if cls is Exception:
        bases = (RuntimeError,)
    described = type(cls.__name__, bases, {"__module__": cls.__module__, "__str__": lambda self: text})
    return described.__new__(described, text)


class _TypeUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        from ._allow_list import find_exception  # which needs this module

        return find_exception(module, name)
