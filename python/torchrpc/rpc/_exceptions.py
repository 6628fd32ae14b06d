"""Sends exceptions from the callee to the caller: the callee describes them as bytes, and the caller rebuilds them with
type and text.

Both steps run on threads of the pool, or on the thread that waits for the call.
"""

import builtins
import contextlib
import io
import pickle
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from torchrpc import _C

from ._by_value import dumps
from ._errors import ORIGINAL_TYPE, RpcError, also
from ._limited_unpickler import LimitedUnpickler
from ._names import find_global
from ._plain_objects import _NAMED, describe_type, find_type

_TYPE_NOT_RESTORED = (
    "Failed to create original exception type. Error msg was {why} Original exception on remote side was {text}"
)

# Python 3.10 has no exception groups.
_BaseExceptionGroup: Any = getattr(builtins, "BaseExceptionGroup", ())
_ExceptionGroup: Any = getattr(builtins, "ExceptionGroup", ())

_WITH_LINKS = b"L"  # the first byte of a detail with nodes; a pickle begins with 0x80
_MOST_NODES = 1000  # exceptions that are sent for a raised one, itself included
_GREATEST_DEPTH = 100  # of nested links: causes of causes, members of members


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
    except Exception as broken:  # raised by a __repr__ or __str__ of the program
        shown, trace = f"{type(exc).__name__} (its repr failed: {type(broken).__name__})", ""
    where = _C._get_current_rpc_agent().get_worker_info() if _C._is_current_rpc_agent_set() else "a stopped worker"
    text = f"On {where}:\n{shown}\n{trace}"
    text = text.encode("utf-8", "backslashreplace").decode()  # UTF-8 cannot encode a lone surrogate
    with contextlib.suppress(Exception):  # stderr may be closed
        print(text, file=sys.stderr)
    if not _C._uses_pickles():
        return text, describe_type(exc)
    try:
        detail = _type_and_attributes(exc)
    except Exception as why:
        text, detail = f"{text}\nThe caller gets a RuntimeError instead of a {type(exc).__qualname__}: {why}", b""
    with contextlib.suppress(Exception):  # raised by a property, or the __reduce__ of a linked exception
        linked = _LinkedExceptions()
        linked.add(exc)
        if linked.have_links():
            return text, _WITH_LINKS + dumps((detail, linked.nodes))
    return text, detail


def _type_and_attributes(exc: BaseException) -> bytes:
    """Return the pickled type and attributes, for `_make_typed`. Raises if the type cannot be pickled by name."""
    cls = vars(type(exc)).get(ORIGINAL_TYPE, type(exc))  # another worker's exception may have a type made here
    return dumps((cls, _picklable_attributes(exc)))


def _picklable_attributes(exc: BaseException) -> dict[str, Any]:
    state = {}
    for name, value in vars(exc).items():
        try:
            pickle.loads(dumps(value))
        except Exception:
            continue
        state[name] = value
    return state


def _rebuild_exception(
    text: str,
    detail: bytes,
    worker_name: str,
    also_runtime_error: bool = False,
    allowed: _C._AllowList | None = None,
) -> BaseException:
    """On the caller: return an exception of the type raised on `worker_name`, with its attributes, whose str() is
    `text`.

    Its `__cause__`, its `__context__` and the members of an ExceptionGroup are rebuilt as well, with their own texts.

    If the constructor of the type needs more than a text, the result is an instance of a subclass of the type that is
    also a RuntimeError (torch's RPC raises RuntimeError then); with `also_runtime_error` it always is. If the type
    cannot be imported here, or is not an Exception, the result is a RuntimeError that says why. If the callee could not
    pickle the type, the result is a RuntimeError with `text`.

    Args:
        allowed: the allow-list under which the detail is read. The extension passes the list of the worker that
            received the exception. Default: the current worker's list.
    """
    text = _Text(text)
    if allowed is None and _C._is_current_rpc_agent_set():
        allowed = _C._allow_list()

    def make(detail: bytes, message: str, members: list[Exception]) -> Exception:
        try:
            return _make_typed(detail, text, allowed, also_runtime_error, message, members)
        except Exception as why:
            return RuntimeError(_TYPE_NOT_RESTORED.format(why=f"{why} (raised on {worker_name})", text=text))

    if cls := find_type(detail, allowed):
        return _make_runtime_error_subclass(cls, text) if also_runtime_error else make_exception(cls, text)
    if not _C._uses_pickles() or detail.startswith(_NAMED):
        return RuntimeError(text)
    if not detail.startswith(_WITH_LINKS):
        return make(detail, "", [])
    try:
        detail, nodes = _load_plain(detail[len(_WITH_LINKS) :], allowed)
        return _Rebuilder(nodes, lambda message, members: make(detail, message, members), allowed).exception(0)
    except Exception as why:  # a callee of this version does not send such bytes
        return RuntimeError(_TYPE_NOT_RESTORED.format(why=f"{why} (raised on {worker_name})", text=text))


def _make_typed(
    detail: bytes,
    text: str,
    allowed: _C._AllowList | None,
    also_runtime_error: bool,
    message: str,
    members: list[Exception],
) -> Any:
    if not detail:
        return RuntimeError(text)
    cls, state = _load_type(detail, allowed)
    args = (message, members) if members and issubclass(cls, _ExceptionGroup) else ()
    exc = _make_runtime_error_subclass(cls, text, *args) if also_runtime_error else make_exception(cls, text, *args)
    vars(exc).update(state)
    return exc


def _load_type(detail: bytes, allowed: _C._AllowList | None) -> tuple[type[Exception], dict[str, Any]]:
    cls, state = _load_typed(detail, allowed)
    if isinstance(cls, tuple):
        kind, other = cls
        if not (_is_subclass(kind, RpcError) and _is_subclass(other, BaseException)):
            raise TypeError("malformed exception: its types are not those of an error of torchrpc.")
        cls = also(kind, other)
    if not _is_subclass(cls, Exception):
        raise TypeError(f"{getattr(cls, '__name__', cls)} is not an Exception.")
    if type(state) is not dict or not all(type(name) is str for name in state):
        raise TypeError("malformed exception: its attributes are no dict with names.")
    return cls, state


def _is_subclass(cls: Any, base: type) -> bool:
    return isinstance(cls, type) and base in cls.__mro__


def make_exception(cls: type[BaseException], text: str, *group_args: Any) -> Any:
    """Return an exception of type `cls` whose str() contains `text`, for any signature of the constructor of `cls`.

    If `cls(text)` fails or drops the text, the result is an instance of a subclass of `cls` and RuntimeError. A group
    is always such an instance; `group_args` are its message and its members.
    """
    text = _Text(text)
    try:
        exc = cls(text)
        if text in str(exc) and not group_args:
            return exc
        why: Any = "its constructor drops the members." if group_args else "its constructor drops the text."
    except Exception as failed:
        why = failed
    return _make_runtime_error_subclass(cls, _TYPE_NOT_RESTORED.format(why=why, text=text), *group_args)


def _make_runtime_error_subclass(cls: type[BaseException], text: str, *args: Any) -> Any:
    """Return an instance of a new subclass of `cls` and RuntimeError whose str() is `text`; no constructor runs.

    `args`: the message and the members of a group.
    """
    text = _Text(text)
    bases = (cls,) if issubclass(cls, RuntimeError) else (cls, RuntimeError)
    if cls is Exception:
        bases = (RuntimeError,)
    original = vars(cls).get(ORIGINAL_TYPE, cls)
    members = {"__module__": cls.__module__, "__str__": lambda self: text, ORIGINAL_TYPE: original}
    described = type(cls.__name__, bases, members)
    new = _ExceptionGroup.__new__ if issubclass(cls, _ExceptionGroup) else described.__new__
    return new(described, *(args or (text,)))


# --- Causes, contexts and members of groups ---


class _Node(NamedTuple):
    """An exception and its links, which are indices of other nodes. All fields are plain data."""

    text: str
    detail: bytes  # from _type_and_attributes; empty for the first node, whose detail is sent beside the nodes
    args: bytes  # pickled; empty if they cannot be pickled
    message: str  # of a group
    cause: int | None
    context: int | None
    suppresses_context: bool
    members: list[int]


class _LinkedExceptions:
    """On the callee: an exception and all exceptions that its links lead to, as nodes.

    Links that close a cycle are omitted, and so are links beyond `_MOST_NODES` exceptions or `_GREATEST_DEPTH`.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[Any, ...]] = []
        self._indices: dict[int, int | None] = {}  # by id; None while the links of an exception are followed

    def have_links(self) -> bool:
        return len(self.nodes) > 1 or _Node(*self.nodes[0]).suppresses_context

    def add(self, exc: BaseException | None, depth: int = 0) -> int | None:
        """Return the index of the node of `exc`, or None if no link may lead to it."""
        if exc is None:
            return None
        if id(exc) in self._indices:
            return self._indices[id(exc)]
        if len(self._indices) >= _MOST_NODES or depth >= _GREATEST_DEPTH:
            return None
        at = len(self.nodes)
        self._indices[id(exc)] = None
        self.nodes.append(())  # the first exception has index 0
        group: Any = exc if isinstance(exc, _BaseExceptionGroup) else None
        members = group.exceptions if group else ()
        indices = [self.add(member, depth + 1) for member in members]
        self.nodes[at] = tuple(
            _Node(
                text=_clean(lambda: str(exc), type(exc).__name__),
                detail=_dumps_or_nothing(lambda: _type_and_attributes(exc)) if at else b"",
                args=_dumps_or_nothing(lambda: _checked_pickle(exc.args)) if at and not members else b"",
                message=_clean(lambda: str(group.message), "") if group else "",
                cause=self.add(exc.__cause__, depth + 1),
                context=self.add(exc.__context__, depth + 1),
                suppresses_context=exc.__suppress_context__,
                members=[index for index in indices if index is not None],
            )
        )
        self._indices[id(exc)] = at
        return at


def _dumps_or_nothing(dump: Callable[[], bytes]) -> bytes:
    try:
        return dump()
    except Exception:
        return b""


def _checked_pickle(value: Any) -> bytes:
    data = dumps(value)
    pickle.loads(data)
    return data


def _clean(text: Callable[[], str], otherwise: str) -> str:
    try:
        return text().encode("utf-8", "backslashreplace").decode()
    except Exception:  # raised by a __str__ of the program
        return otherwise


class _Rebuilder:
    """On the caller: builds exceptions from nodes.

    Args:
        nodes: the nodes of `_LinkedExceptions`.
        make_first: makes the first exception from the message and the members of a group.
        allowed: the allow-list under which the types are read.
    """

    def __init__(
        self,
        nodes: list[tuple[Any, ...]],
        make_first: Callable[[str, list[Exception]], Exception],
        allowed: _C._AllowList | None,
    ) -> None:
        self._nodes = [_Node(*node) for node in nodes[:_MOST_NODES]]
        self._make_first = make_first
        self._allowed = allowed
        self._made: dict[int, Exception | None] = {}

    def exception(self, index: int) -> Exception:
        if index in self._made:
            if (made := self._made[index]) is None:
                raise ValueError("malformed exception: its links form a cycle")
            return made
        self._made[index] = None
        node = self._nodes[index]
        members = [self.exception(each) for each in node.members]
        exc = self._make_first(node.message, members) if index == 0 else _make_linked(node, members, self._allowed)
        cause = None if node.cause is None else self.exception(node.cause)
        context = None if node.context is None else self.exception(node.context)
        assign = BaseException.__setattr__  # the class may have a __setattr__ of its own, as frozen dataclasses have
        assign(exc, "__cause__", cause)
        assign(exc, "__context__", context)
        assign(exc, "__suppress_context__", bool(node.suppresses_context))  # after the cause, which sets it
        self._made[index] = exc
        return exc


def _make_linked(node: _Node, members: list[Exception], allowed: _C._AllowList | None) -> Exception:
    """Return an exception of the node's type whose str() is the node's text, or a RuntimeError that says why not."""
    text = _Text(node.text)
    try:
        if not node.detail:
            raise TypeError("its type cannot be pickled.")
        cls, state = _load_type(node.detail, allowed)
        exc: Any
        if members and issubclass(cls, _ExceptionGroup):
            exc = _ExceptionGroup.__new__(cls, node.message, members)
        else:
            exc = make_exception(cls, text)
            if str(exc) != text:
                exc = _make_runtime_error_subclass(cls, text)
            _restore_args(exc, node, allowed)
        vars(exc).update(state)
        return exc
    except Exception as why:
        return RuntimeError(_TYPE_NOT_RESTORED.format(why=why, text=text))


def _restore_args(exc: BaseException, node: _Node, allowed: _C._AllowList | None) -> None:
    """Give `exc` the arguments of the original if its text stays the same."""
    ours = exc.args
    with contextlib.suppress(Exception):  # the node has no arguments, or this worker cannot rebuild them
        BaseException.__setattr__(exc, "args", _load_typed(node.args, allowed))
        if str(exc) == node.text:
            return
    BaseException.__setattr__(exc, "args", ours)


def _load_plain(data: bytes, allowed: _C._AllowList | None) -> Any:
    """Read plain data only."""
    if allowed is not None:
        return LimitedUnpickler(data, allowed, is_plain=True).load()
    return _PlainUnpickler(io.BytesIO(data)).load()


def _load_typed(data: bytes, allowed: _C._AllowList | None) -> Any:
    """Read the detail of an exception; with an allow-list, only types that the list allows."""
    if allowed is not None:
        return LimitedUnpickler(data, allowed, is_exception=True).load()
    return _TypeUnpickler(io.BytesIO(data)).load()


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain data only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"malformed exception: it has {module}.{name} where only plain data may be")


class _TypeUnpickler(pickle.Unpickler):
    """Reads the detail of an exception."""

    def find_class(self, module: str, name: str) -> Any:
        return find_global(module, name)
