"""Sends exceptions from the callee to the caller: the callee describes them as bytes, and the caller rebuilds them with
type and text.

Both steps run on threads of the pool, or on the thread that waits for the call.
"""

import contextlib
import inspect
import io
import pickle
import re
import traceback
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torchrpc import _C

from .._errors import ORIGINAL_TYPE, RemoteException, RpcError, also
from .._security.allow_list import hidden_name
from .by_value import dumps, is_main_by_value
from .exception_parts import (
    BaseExceptionGroup,
    are_fields,
    built_in_base,
    instance,
    is_notes,
    members_of,
    set_state,
)
from .failure_log import log_raised
from .names import find_global, has_name, replaces_torch, rule_for_variable
from .plain_objects import find_exception_type
from .shown_size import is_shown_small

_TYPE_NOT_RESTORED = (
    "Failed to create original exception type. Error msg was {why} Original exception on remote side was {text}"
)

_ARGS = "args"  # in a pickled state: the pickled arguments and fields
_NO_CLASSES = (None,)  # for the extension: objects of no class of the program are sent
_MOST_NODES = 1000  # exceptions that are sent for a raised one, itself included
_GREATEST_DEPTH = 100  # of nested links: causes of causes, members of members
# Characters of a text that shows arguments and attributes: a few bytes can refer to the same parts very often.
_MOST_SHOWN = 1 << 22
_FREE_SHOWN = 1 << 20  # of a received exception, in addition to the following
_SHOWN_OF_A_BYTE = 16


class _Text(str):
    """An argument of an exception that equals the original argument and is shown as the text of the whole error.

    So `exc.args` and the attributes are those of the original, and `str(exc)` is the text.
    """

    _shown: str

    def __new__(cls, original: str, shown: str) -> "_Text":
        text = super().__new__(cls, original)
        text._shown = shown
        return text

    def __str__(self) -> str:
        return self._shown

    __repr__ = __str__  # KeyError prints the repr of its argument

    def __reduce__(self) -> Any:
        return str, (str.__str__(self),)


def _repr_with_line_breaks(exc: BaseException) -> str:
    return re.sub(r"\\(\\|n)", lambda match: "\n" if match[1] == "n" else match[0], repr(exc))


def _describe_exception(exc: BaseException, caller: str = "") -> tuple[str, bytes]:
    """On the callee: return the text for the caller, and the bytes that `_rebuild_exception` needs. Log the exception.

    Never raises. The bytes say nothing of the type if it cannot be pickled by name.
    """
    is_small = is_shown_small(exc, _MOST_SHOWN)
    try:
        if not is_small:  # a caller can choose the arguments of an exception
            raise OverflowError
        shown, trace = _repr_with_line_breaks(exc), "".join(traceback.format_exception(exc))
        if is_passed_on := str(exc).startswith("On WorkerInfo("):  # the traceback has the whole text of that worker
            shown = f"{type(exc).__qualname__} of a call that it made:"
    except Exception as broken:  # raised by a __repr__ or __str__ of the program
        is_passed_on = False
        why = f"its repr failed: {type(broken).__name__}" if is_small else "its arguments are too large to show"
        shown, trace = f"{type(exc).__name__} ({why})", "".join(traceback.format_tb(exc.__traceback__))
    where = _C._get_current_rpc_agent().get_worker_info() if _C._is_current_rpc_agent_set() else "a stopped worker"
    head, trace = _sendable(f"On {where}:\n{shown}\n{_advice_for(exc)}"), _sendable(trace)
    text = head + trace
    if not is_passed_on:
        with contextlib.suppress(Exception):  # raised by a filter of the program
            log_raised(exc, shown, caller, is_small)
    if not is_small:
        return text, b""
    try:
        detail = _detail_of(exc)
    except Exception as why:
        text = f"{text}\nThe caller gets a RemoteException instead of a {type(exc).__qualname__}: {why}"
        detail = b""
    nodes: list[tuple[Any, ...]] = []
    with contextlib.suppress(Exception):  # raised by a property, or the __reduce__ of a linked exception
        linked = _LinkedExceptions()
        linked.add(exc)
        nodes = linked.nodes
    return text, _C._encode_objects((detail, nodes, len(head), len(trace)), _NO_CLASSES)


def _advice_for(exc: BaseException) -> str:
    """Return a line for a function that came as code and uses a variable that this worker does not have, or ""."""
    if not isinstance(exc, NameError) or isinstance(exc, UnboundLocalError) or not isinstance(exc.name, str):
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
    rule = rule_for_variable(exc.name, frames[-1].f_globals) if frames else ""
    return rule and f"{rule}\n"


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()  # UTF-8 cannot encode a lone surrogate


def _detail_of(exc: BaseException) -> bytes:
    """Return type, arguments and attributes, for `_load_detail`: as objects without pickle and, if that cannot have all
    of them, as a pickle, too, for callers that read pickles. Raises if the type has no name and cannot be pickled.
    """
    cls = vars(type(exc)).get(ORIGINAL_TYPE, type(exc))  # another worker's exception may have a type made here
    kinds = cls if isinstance(cls, tuple) else (cls,)
    has_names = all(has_name(kind) and not (kind.__module__ == "__main__" and is_main_by_value()) for kind in kinds)
    contents = exc.args, members_of(exc)
    attributes = vars(exc)
    objects = _encoded(contents, _NO_CLASSES), _encoded(dict(attributes), _NO_CLASSES)
    is_complete = has_names and all(objects)
    if not is_complete:
        classes = (_C._allow_list(),)
        sendable = {name: value for name, value in attributes.items() if _encoded(value, classes)}
        objects = _encoded(contents, classes), _encoded(sendable, classes)
    pickled = b"" if is_complete or not _C._uses_pickles() else _pickled_type_and_state(exc, kinds)
    if not (has_names or pickled):
        raise TypeError("its type has no name at the top level of a module.")
    names = [(kind.__module__, kind.__qualname__) for kind in kinds] if has_names else []
    return _C._encode_objects((names, *objects, pickled), _NO_CLASSES)


def _encoded(value: Any, classes: tuple) -> bytes:
    """Return a value as objects without pickle; no bytes if it cannot be sent like this."""
    try:
        return _C._encode_objects(value, classes)
    except Exception:
        return b""


def _pickled_type_and_state(exc: BaseException, kinds: tuple[type, ...]) -> bytes:
    """Return the pickled type and attributes. Raises if the type cannot be pickled by name."""
    cls = kinds if len(kinds) > 1 else kinds[0]
    state = _picklable(vars(exc))
    # Apart, because the caller may have no class of an argument's name, and has the type nevertheless.
    with contextlib.suppress(Exception):
        state[_ARGS] = _checked_pickle((exc.args, _picklable(members_of(exc))))
    return dumps((cls, state))


def _picklable(values: dict[str, Any]) -> dict[str, Any]:
    state = {}
    for name, value in values.items():
        try:
            _checked_pickle(value)
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
    """On the caller: return an exception of the type raised on `worker_name`, with its state, whose str() contains
    `text`.

    Its `__cause__`, its `__context__` and the members of an ExceptionGroup are rebuilt as well, with their own texts.
    The state is set without a constructor of the program. The result may be an instance of a subclass that has the name
    of the type. This subclass is also a RuntimeError with `also_runtime_error`, and if the constructor of the type
    needs more than a text: torch's RPC raises RuntimeError then. If the type cannot be imported here, is not an
    Exception, or could not be pickled by the callee, the result is a RemoteException.

    Args:
        allowed: the allow-list under which the detail is read. The extension passes the list of the worker that
            received the exception. Default: the current worker's list.
    """
    if allowed is None and _C._is_current_rpc_agent_set():
        allowed = _C._allow_list()
    nodes: list[_Node] = []
    told: tuple[str, ...] = ()
    most_shown = _FREE_SHOWN + _SHOWN_OF_A_BYTE * len(detail)
    try:
        if detail:
            detail, received, head, trace = _C._decode_objects(detail, allowed)
            nodes = _checked_nodes(received, most_shown)
            told = (nodes[0].type_name, nodes[0].text, text[head : head + trace]) if nodes else ()

        def make(message: str, members: list[Exception]) -> Exception:
            if not detail:
                # The text of an operator, or of a C++ function, names no worker. That of a backward pass does.
                is_named = bool(told) or also_runtime_error or worker_name in text
                return RemoteException(text if is_named else f"On {worker_name}: {text}", worker_name, *told)
            try:
                loaded = _load_detail(detail, allowed)
                return _make_typed(loaded, text, message, members, most_shown, also_runtime_error)
            except Exception as why:
                shown = _TYPE_NOT_RESTORED.format(why=f"{text_of(why)} (raised on {worker_name})", text=text)
                return RemoteException(shown, worker_name, *told)

        return _Rebuilder(nodes, make, allowed, worker_name, most_shown).exception(0) if nodes else make("", [])
    except Exception as why:  # a callee of this version does not send such bytes
        return RemoteException(
            _TYPE_NOT_RESTORED.format(why=f"{text_of(why)} (raised on {worker_name})", text=text), worker_name
        )


class _Loaded(NamedTuple):
    """The parts of a received exception. A part that could not be sent or read is empty; `args` is None then."""

    cls: type[Exception]
    attributes: dict[str, Any]
    args: tuple | None = None
    fields: Any = {}  # noqa: RUF012  not changed


def _load_detail(detail: bytes, allowed: _C._AllowList | None) -> _Loaded:
    names, contents, attributes, pickled = _C._decode_objects(detail, allowed)
    if pickled and allowed is None and _C._uses_pickles():
        cls, state = _TypeUnpickler(io.BytesIO(pickled)).load()
        loaded = _Loaded(_exception_type(cls), state)
        with contextlib.suppress(Exception):  # the callee could not send them, or this worker cannot rebuild them
            args, fields = _TypeUnpickler(io.BytesIO(state.pop(_ARGS, b""))).load()
            return loaded._replace(args=args, fields=fields)
        return loaded
    is_free = allowed is None and _C._uses_pickles()
    kinds = tuple(
        (find_global if is_free else find_exception_type)(*name, *(() if is_free else (allowed,))) for name in names
    )
    loaded = _Loaded(_exception_type(kinds if len(kinds) > 1 else kinds[0]), {})
    with contextlib.suppress(Exception):
        received = _C._decode_objects(attributes, allowed)
        if type(received) is dict and all(type(name) is str for name in received):
            loaded = loaded._replace(attributes=received)
    with contextlib.suppress(Exception):
        args, fields = _C._decode_objects(contents, allowed)
        if type(args) is tuple:
            loaded = loaded._replace(args=args, fields=fields)
    return loaded


def _exception_type(cls: Any) -> type[Exception]:
    if isinstance(cls, tuple):
        kind, other = cls
        if not (_is_subclass(kind, RpcError) and _is_subclass(other, BaseException)):
            raise TypeError("malformed exception: its types are not those of an error of torchrpc.")
        cls = also(kind, other)
    if not _is_subclass(cls, Exception):
        raise TypeError(f"{cls.__name__ if isinstance(cls, type) else type(cls).__name__} is not an Exception.")
    return cls


def _is_subclass(cls: Any, base: type) -> bool:
    return isinstance(cls, type) and base in cls.__mro__


def _make_typed(
    loaded: _Loaded,
    text: str,
    message: str,
    members: list[Exception],
    most_shown: int,
    also_runtime_error: bool = False,
    is_linked: bool = False,
) -> Any:
    """Return an exception of these parts whose str() contains `text`.

    Args:
        message, members: of a group.
        most_shown: the characters that a text with the arguments, or with the attributes, may have.
        is_linked: it is not the exception that the caller gets, but one to which that has a link.
    """
    cls = loaded.cls
    fields: dict[str, Any] = {}
    args: tuple = (_Text(text, text),)
    are_usable = loaded.args is not None and are_fields(cls, loaded.fields)
    if are_usable and is_shown_small((loaded.args, loaded.fields), most_shown):
        args, fields = tuple(loaded.args or ()), loaded.fields
    # A state that is too large to show, notes that are no texts, and names that would hide parts of the class are lost.
    state = loaded.attributes if is_shown_small(loaded.attributes, most_shown) else {}
    state = {name: value for name, value in state.items() if is_notes(name, value) or not hidden_name(cls, [name])}
    if members and issubclass(cls, BaseExceptionGroup):
        args = (message, members)
    why = None if also_runtime_error or is_linked else _why_torch_has_none(cls, text)
    if also_runtime_error or why:
        shown = _TYPE_NOT_RESTORED.format(why=why, text=text) if why and replaces_torch() else text
        exc = instance(_subclass(cls, shown, RuntimeError), args)
    else:
        exc = instance(cls, args)
    set_state(exc, state, fields)
    if _shows(exc, text):
        return exc
    if len(args) == 1 and type(args[0]) is str:
        arg = _Text(args[0], text)
        exc = instance(cls, (arg,))
        set_state(exc, state, {name: arg if value == args[0] else value for name, value in fields.items()})
        if _shows(exc, text):
            return exc
    exc = instance(_subclass(cls, text), args)
    set_state(exc, state, fields)
    return exc


def text_of(exc: BaseException) -> str:
    """Return the str() of an exception; its type's name if that fails, or if the text is very long."""
    if not is_shown_small(exc, _MOST_SHOWN):
        return type(exc).__name__
    return _clean(lambda: str(exc), type(exc).__name__)


def _shows(exc: BaseException, text: str) -> bool:
    try:
        return text in str(exc)
    except Exception:  # raised by a __str__ of the program
        return False


def _why_torch_has_none(cls: type[Exception], text: str) -> Exception | None:
    """Return why torch's RPC, which calls the constructor with the text, would make a RuntimeError; None if it would
    not. No constructor of the program runs.
    """
    try:
        if any(isinstance(each, types.FunctionType) for each in (cls.__init__, cls.__new__)):
            inspect.signature(cls).bind(text)
        else:
            cls(text)
    except Exception as why:
        return why
    return None


def make_exception(cls: type[BaseException], text: str) -> Any:
    """Return an exception of type `cls` whose str() contains `text`.

    If `cls(text)` fails or drops the text, the result is an instance of a subclass that is also a RuntimeError.
    """
    why: Any = "its constructor drops the text."
    try:
        exc = cls(_Text(text, text))
        if text in str(exc):
            return exc
    except Exception as failed:
        why = failed
    return _make_also_runtime_error(cls, _TYPE_NOT_RESTORED.format(why=why, text=text) if replaces_torch() else text)


def _make_also_runtime_error(cls: type[BaseException], text: str) -> Any:
    return _with_text(_subclass(cls, text, RuntimeError), text)


def _with_text(cls: type[BaseException], text: str) -> Any:
    if issubclass(cls, BaseExceptionGroup):
        return RemoteException(text, type_name=f"{cls.__module__}.{cls.__qualname__}")  # it has no members
    return built_in_base(cls).__new__(cls, text)


def _subclass(cls: type[BaseException], text: str, other: type[BaseException] | None = None) -> type[Any]:
    """Return a new subclass of `cls`, and of `other` if it is given, whose str() is `text`. Pickles have the type that
    was raised.
    """
    original = vars(cls).get(ORIGINAL_TYPE, cls)
    bases = (cls,) if other is None or issubclass(cls, other) else (other,) if cls is Exception else (cls, other)

    def reduce(self: Any) -> Any:
        return (original if isinstance(original, type) else cls, *super(made, self).__reduce__()[1:])

    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__str__": lambda self: text,
        "__reduce__": reduce,
        ORIGINAL_TYPE: original,
    }
    made: Any = type(cls.__name__, bases, members)
    return made


# --- Causes, contexts and members of groups ---


class _Node(NamedTuple):
    """An exception and its links, which are indices of other nodes. All fields are plain data."""

    text: str
    type_name: str
    detail: bytes  # from _detail_of; empty for the first node, whose detail is sent beside the nodes
    message: str  # of a group
    cause: int | None
    context: int | None
    suppresses_context: bool
    members: list[int]


_LINK = (int, type(None))
_KINDS_OF_NODE = ((str,), (str,), (bytes,), (str,), _LINK, _LINK, (bool,), (list,))


def _checked_nodes(received: Any, most_shown: int) -> list[_Node]:
    """Return the received nodes. Raise ValueError if they are none, or if their texts are too long together."""
    nodes = [_Node(*node) for node in received[:_MOST_NODES]]
    for node in nodes:
        most_shown -= len(node.text) + len(node.type_name) + len(node.message)
        are_kinds = all(type(each) in kinds for each, kinds in zip(node, _KINDS_OF_NODE, strict=True))
        if not are_kinds or most_shown < 0:
            raise ValueError("malformed exception: its links are no texts and numbers, or too long")
    return nodes


class _LinkedExceptions:
    """On the callee: an exception and all exceptions that its links lead to, as nodes.

    Links that close a cycle are omitted, and so are links beyond `_MOST_NODES` exceptions or `_GREATEST_DEPTH`.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[Any, ...]] = []
        self._indices: dict[int, int | None] = {}  # by id; None while the links of an exception are followed

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
        group: Any = exc if isinstance(exc, BaseExceptionGroup) else None
        members = group.exceptions if group else ()
        indices = [self.add(member, depth + 1) for member in members]
        self.nodes[at] = tuple(
            _Node(
                text=_clean(lambda: str(exc), type(exc).__name__),
                type_name=f"{type(exc).__module__}.{type(exc).__qualname__}",
                detail=_bytes_or_nothing(lambda: _detail_of(exc)) if at else b"",
                message=_clean(lambda: str(group.message), "") if group else "",
                cause=self.add(exc.__cause__, depth + 1),
                context=self.add(exc.__context__, depth + 1),
                suppresses_context=exc.__suppress_context__,
                members=[index for index in indices if index is not None],
            )
        )
        self._indices[id(exc)] = at
        return at


def _bytes_or_nothing(dump: Callable[[], bytes]) -> bytes:
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
        worker_name: the worker that has raised them.
        most_shown: as for `_make_typed`.
    """

    def __init__(
        self,
        nodes: list[_Node],
        make_first: Callable[[str, list[Exception]], Exception],
        allowed: _C._AllowList | None,
        worker_name: str,
        most_shown: int,
    ) -> None:
        self._nodes = nodes
        self._most_shown = most_shown
        self._make_first = make_first
        self._allowed = allowed
        self._worker_name = worker_name
        self._made: dict[int, Exception | None] = {}

    def exception(self, index: int) -> Exception:
        if index in self._made:
            if (made := self._made[index]) is None:
                raise ValueError("malformed exception: its links form a cycle")
            return made
        self._made[index] = None
        node = self._nodes[index]
        members = [self.exception(each) for each in node.members]
        exc = self._make_first(node.message, members) if index == 0 else self._make_linked(node, members)
        cause = None if node.cause is None else self.exception(node.cause)
        context = None if node.context is None else self.exception(node.context)
        assign = BaseException.__setattr__  # the class may have a __setattr__ of its own, as frozen dataclasses have
        assign(exc, "__cause__", cause)
        assign(exc, "__context__", context)
        assign(exc, "__suppress_context__", bool(node.suppresses_context))  # after the cause, which sets it
        self._made[index] = exc
        return exc

    def _make_linked(self, node: _Node, members: list[Exception]) -> Exception:
        """Return an exception of the node's type with the node's text, or a RemoteException that says why not."""
        try:
            if not node.detail:
                raise TypeError("its type cannot be pickled.")
            loaded = _load_detail(node.detail, self._allowed)
            return _make_typed(loaded, node.text, node.message, members, self._most_shown, is_linked=True)
        except Exception as why:
            text = _TYPE_NOT_RESTORED.format(why=text_of(why), text=node.text)
            return RemoteException(text, self._worker_name, node.type_name, node.text)


class _TypeUnpickler(pickle.Unpickler):
    """Reads the detail of an exception."""

    def find_class(self, module: str, name: str) -> Any:
        return find_global(module, name)
