"""Reads the pickles that a worker with `allowed_functions` receives. It has its own interpreter, because Python's
unpickler can call any value, and set attributes of any object, to which a pickle can refer.

A pickle may contain plain data, which the constructors of `_limited_data` build and check, and functions, classes and
members of enums that the list has. It may call the functions that a caller may call. It may change only containers and
instances that it has created itself. It sets attributes only in their `__dict__` and `__slots__`, or by the
`__setstate__` of a listed class. See Note [Limited pickles]. Threads: any; each pickle has its own reader.
"""

import _compat_pickle
import builtins
import collections
import enum
import pickle
import pickletools
import struct
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchrpc import _C

from ._allow_list import (
    CALLED_BY_THE_PACKAGE,
    check_member,
    claimed_name,
    class_attribute,
    find_listed,
    is_listed_class,
    refused,
    refused_code,
    refused_value,
    shortened,
)
from ._errors import NameNotFoundError, NotAllowedError, SerializationError
from ._limited_data import (
    BUILT_BY_STATE,
    CONSTRUCTORS,
    DATA,
    MAPPINGS,
    PLAIN_KEYS,
    SEQUENCES,
    WITH_ATTRIBUTES,
    MalformedError,
    StandIn,
    require,
)
from ._names import find_global

# Note [Limited pickles]
#
# - Only the opcodes of `_HANDLERS` and `_run` exist: those that Python's pickler writes for protocols 2 to 5, without
#   persistent ids and extension codes.
# - A name stands for plain data (`DATA`), a helper of the sender's pickler (`Helpers`), or an object on the list.
#   Nothing else is imported or looked up.
# - Helpers, and functions of the package that only a call may run, are stand-ins (`StandIn`) on the stack. A pickle
#   that ends with a stand-in left is refused, so stand-ins never become values.
# - REDUCE, NEWOBJ and NEWOBJ_EX compare callables by identity with the objects that this pickle has looked up, so an
#   object cannot pass for a listed one by its attributes or by its `__eq__`.
# - BUILD, and opcodes that add items, need an object to which only this pickle referred when the object was created: a
#   constructor may return an object that the worker shares, such as a singleton.
# - The effort is bounded by the number of received bytes: numbers, keys and the depth of nesting have limits. The memo
#   lets a few bytes refer to a large value many times, so copies of values, and computations with numbers, are charged
#   to a budget (`charge`).

Helpers = Mapping[str, StandIn]  # name of a function of the sender's pickler -> what to do with its arguments

_MOST_INT_BYTES = 1 << 16
_MOST_NAME_CHARACTERS = 1000
_DEEPEST_KEY = 200  # nested tuples in a key: Python's hash of a tuple recurses without a check
_DEEPEST_VALUE = 5000
_FREE_EFFORT = 1 << 20  # bytes that may be copied, in addition to the following
_EFFORT_OF_A_BYTE = 16  # bytes that may be copied for each byte of the pickle
_ELEMENT_EFFORT = 16  # bytes to charge for an element of a container
_LARGE_KEY_BITS = 1 << 10
_KEY_EFFORT = 100_000  # tuples and elements that may be hashed, in addition to one for each byte of the pickle


def _references_to_a_local() -> int:
    """Return the `sys.getrefcount` of an object to which one local variable refers: 2; since Python 3.14: 1."""
    value = object()
    return sys.getrefcount(value)


_REFERENCES_TO_A_LOCAL = _references_to_a_local()


class _Unbuilt:
    """A placeholder for an object until BUILD provides its contents."""

    __slots__ = ("build", "memo_index")

    def __init__(self, build: Callable[[Any], Any], memo_index: int) -> None:
        self.build = build
        self.memo_index = memo_index


class Call(NamedTuple):
    """The function of a call and its arguments."""

    func: Any
    args: tuple
    kwargs: dict[str, Any]


_STAND_INS = (StandIn, _Unbuilt, Call)

_TRAVELS_BY_VALUE = "functions and classes of a notebook or an interactive session"
_CALL = "torchrpc.rpc.internal.PythonUDF"
_CALL_STAND_IN = StandIn(_CALL, None)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was made at run time
_SETSTATE_OF_EXCEPTIONS = BaseException.__setstate__
_OPCODE_NAMES = {opcode.code.encode("latin1")[0]: opcode.name for opcode in pickletools.opcodes}
_OWN_ERRORS = (NotAllowedError, NameNotFoundError, SerializationError)


class LimitedUnpickler:
    """Reads one pickle. See the top of this file.

    Args:
        data: the pickle; bytes after its end are ignored.
        allowed: the allow-list.
        tensors: the tensors to which the pickle refers by index.
        buffers: out-of-band buffers, in the order of their use.
        helpers: functions of the sender's pickler.
        code: names of functions whose arguments would be code -> what that code is, for the text of the refusal.
        is_call: whether the pickle must be a call: then `load` returns a `Call`.
        is_exception: whether the pickle is part of an exception, and may contain the types of Python's exceptions.
        is_plain: whether the pickle may contain no names at all.
    """

    def __init__(
        self,
        data: bytes,
        allowed: _C._AllowList,
        *,
        tensors: Sequence[torch.Tensor] = (),
        buffers: Sequence[Any] = (),
        helpers: Helpers | None = None,
        code: Mapping[str, str] | None = None,
        is_call: bool = False,
        is_exception: bool = False,
        is_plain: bool = False,
    ) -> None:
        self.allowed = allowed
        self.tensors = tensors
        self._data = data
        self._buffers = iter(buffers)
        self._helpers = helpers or {}
        self._code = code or {}
        self._is_call = is_call
        self._is_exception = is_exception
        self._is_plain = is_plain
        self._protocol = 0
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # the stacks below the marks
        self._memo: dict[int, Any] = {}
        self._stand_ins = 0  # the number of them on the stacks and in values
        self._call: Call | None = None
        # By id, with the object, so that no other object gets its id:
        self._listed: dict[int, Any] = {}  # objects on the list that this pickle has looked up
        self._made: dict[int, Any] = {}  # instances of listed classes that only this pickle refers to
        self._shared: dict[int, Any] = {}  # returned by listed functions; the worker may share them
        self._key_efforts: dict[int, tuple[Any, int, int]] = {}  # of keys: the effort to hash it, and its depth
        self._copied: set[int] = set()  # addresses of storages
        self._key_effort_left = _KEY_EFFORT + len(data)
        self._effort_left = _FREE_EFFORT + _EFFORT_OF_A_BYTE * len(data)
        self._runs_listed_code = False  # exceptions of such code are passed on unchanged

    def load(self) -> Any:
        """Return the object.

        Raises:
            NotAllowedError: the list does not allow something in the pickle.
            SerializationError: the pickle is malformed, or takes too much memory or time for its size.
            NameNotFoundError: this worker does not have a name that the list allows.
            Exception: raised by listed classes and functions.
        """
        try:
            return self._run()
        except _OWN_ERRORS:
            raise
        except Exception as exc:
            if self._runs_listed_code and not isinstance(exc, MalformedError):
                raise
            why = str(exc) if isinstance(exc, MalformedError) else f"{type(exc).__name__}: {exc}"
            worker = self.allowed.worker
            raise SerializationError(
                f"{worker} cannot read a pickle: {why}. On a worker with allowed_functions, send only what Python's "
                "pickler has written, by the same version of torchrpc.",
                worker,
            ) from exc

    def _run(self) -> Any:
        data, memo, stack, handlers = self._data, self._memo, self._stack, _TABLE
        at, size = 0, len(data)
        while True:
            opcode = data[at]
            at += 1
            # The most frequent opcodes are handled here, the others by functions.
            if opcode == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif opcode == _SHORT_BINUNICODE:
                end = at + 1 + data[at]
                if end > size:
                    raise MalformedError("it ends before its contents do")
                stack.append(str(data[at + 1 : end], "utf-8", "surrogatepass"))
                at = end
            elif opcode == _BINGET:
                value = memo[data[at]]
                at += 1
                if type(value) in _STAND_INS:
                    self._note_copy(value)
                stack.append(value)
            elif opcode == _BININT1:
                stack.append(data[at])
                at += 1
            elif (handler := handlers[opcode]) is not None:
                at = handler(self, at)
                stack = self._stack
            elif opcode == _STOP:
                return self._finish()
            else:
                raise self._refuse_opcode(opcode)

    def _finish(self) -> Any:
        (value,) = self._stack
        if self._outer:
            raise MalformedError("it ends within a mark")
        if self._is_call:
            if value is not self._call or value is None:
                raise MalformedError("it is not a call")
            self._stand_ins -= 1
        if self._stand_ins:
            name = next((each.name for each in self._memo.values() if type(each) is StandIn), "a part of its pickler")
            raise refused_value(name, self.allowed)
        if len(self._data) > _DEEPEST_VALUE:
            self._check_depth(value)
        return value

    def _refuse_opcode(self, opcode: int) -> Exception:
        if (name := _OPCODE_NAMES.get(opcode)) is None:
            return MalformedError(f"it has the byte {opcode:#04x} in the place of an opcode")
        worker = self.allowed.worker
        return NotAllowedError(
            f"{worker} does not let others send pickles with the opcode {name}, because it was started with "
            "allowed_functions. Python's pickler does not write that opcode in protocols 2 to 5: send values as they "
            "are, and let torchrpc pickle them.",
            worker,
        )

    # --- Bytes ---

    def _take(self, at: int, count: int) -> bytes:
        end = at + count
        if end > len(self._data):
            raise MalformedError("it ends before its contents do")
        return self._data[at:end]

    def _take_counted(self, at: int, width: int) -> tuple[bytes, int]:
        count = int.from_bytes(self._take(at, width), "little")
        at += width
        return self._take(at, count), at + count

    # --- Names ---

    def _push_global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise MalformedError("a name in it is no text")
        if self._protocol < 3:
            module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
            module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        value = self._find(module, name)
        if type(value) is StandIn:
            self._stand_ins += 1
        self._stack.append(value)

    def _find(self, module: str, name: str) -> Any:
        if self._is_plain:
            raise MalformedError(f"it has {shortened(f'{module}.{name}')} where only plain data may be")
        full_name = f"{module}.{name}"
        if (found := DATA.get(full_name, self)) is not self:
            return found
        if (helper := self._helpers.get(full_name)) is not None:
            return helper
        if full_name == _CALL:
            return _CALL_STAND_IN
        if full_name in CALLED_BY_THE_PACKAGE:
            if not self._is_call:
                raise refused_value(full_name, self.allowed)
            check_member(full_name, self.allowed)
            return StandIn(full_name, lambda: find_global(module, name))
        if what := self._code.get(full_name):
            raise refused_code(what, self.allowed)
        if module.partition(".")[0] == "cloudpickle":
            raise refused_code(_TRAVELS_BY_VALUE, self.allowed)
        if self._is_exception and module == "builtins":
            found = vars(builtins).get(name)
            if isinstance(found, type) and issubclass(found, Exception):
                return found
        if len(full_name) > _MOST_NAME_CHARACTERS:
            raise refused(full_name, self.allowed)
        found = find_listed(module, name, self.allowed)
        self._listed[id(found)] = found
        return found

    # --- Calls ---

    def check_callable(self, function: Any) -> None:
        """Raise NotAllowedError unless this pickle has looked up `function`, and the list has it."""
        if self._listed.get(id(function), self) is not function:
            kind = type(function)
            name = claimed_name(function) if issubclass(kind, type) else f"an object of type {kind.__qualname__}"
            raise NotAllowedError(
                f"{self.allowed.worker} does not let a pickle call {shortened(name) or 'a class without a name'}: only "
                "functions and classes that its allowed_functions have, with the arguments that a pickler writes for "
                "plain data.",
                self.allowed.worker,
            )

    def charge(self, effort: int) -> None:
        """Charge this number of bytes to the budget of this pickle. Raise if it is exceeded."""
        self._effort_left -= effort
        if self._effort_left < 0:
            raise MalformedError("it takes too much memory or time to read for the number of its bytes")

    def charge_for_copy(self, tensor: torch.Tensor) -> None:
        """Charge a copy of a tensor to the budget. The first copy of its received memory is free."""
        bytes_of_copy = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._copied:
            self._copied.add(storage.data_ptr())
            bytes_of_copy = max(0, bytes_of_copy - storage.nbytes())
        self.charge(bytes_of_copy)

    def _charge_for(self, values: Any) -> None:
        """Charge a copy of each value that a constructor gets to the budget."""
        if type(values) is dict:
            self.charge(_ELEMENT_EFFORT * len(values))
        elif type(values) is tuple:
            for value in values:
                if type(value) in (str, bytes, bytearray):
                    self.charge(len(value))
                elif type(value) in (list, tuple, dict):
                    self.charge(_ELEMENT_EFFORT * len(value))

    def _construct(self, function: Any, args: Any) -> Any:
        """REDUCE: return the result of `function(*args)`."""
        if type(args) is not tuple:
            raise MalformedError("the arguments of a call in it are no tuple")
        if type(function) is StandIn:
            self._stand_ins -= 1
            construct = function.construct
            if construct is None or function.name in CALLED_BY_THE_PACKAGE:
                raise refused_value(function.name, self.allowed)
            self._charge_for(args)
            return construct(self, args)
        if (construct := CONSTRUCTORS.get(id(function))) is not None:
            self._charge_for(args)
            return construct(self, args)
        return self._call_listed(function, function, args, {})

    def _call_listed(self, function: Any, run: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return `run(*args, **kwargs)`. `run` is `function` or, for a class, its `__new__`."""
        self.check_callable(function)
        is_class = isinstance(function, type)
        if is_class and issubclass(function, type):
            raise refused(f"{claimed_name(function)} as the class of a class", self.allowed)
        if is_class and issubclass(function, enum.Enum) and (len(args) != 1 or run is not function):
            raise MalformedError("its arguments for a member of an enum are not those that a pickler writes")
        self._runs_listed_code = True
        value = run(*args, **kwargs)
        self._runs_listed_code = False
        kind = type(value)
        # Other code refers to the value, too, or it is a member of an enum.
        if sys.getrefcount(value) > _REFERENCES_TO_A_LOCAL or isinstance(kind, enum.EnumMeta):
            self._shared[id(value)] = value
        elif any(base is function for base in kind.__mro__) if is_class else is_listed_class(kind, self.allowed):
            self._made[id(value)] = value
        return value

    def _make_object(self, kind: Any, args: Any, kwargs: Any) -> Any:
        """NEWOBJ and NEWOBJ_EX: return `kind.__new__(kind, *args, **kwargs)`."""
        are_names = type(kwargs) is dict and (not kwargs or all(type(key) is str for key in kwargs))
        if type(args) is not tuple or not are_names:
            raise MalformedError("the arguments of a call in it are no tuple, or no dict with names")
        if type(kind) is StandIn:
            if kind.name != _CALL or kwargs:
                raise refused_value(kind.name, self.allowed)
            return self._make_call(args)
        if kind is object:
            require(not args and not kwargs, "object")
            return object()
        if (build := BUILT_BY_STATE.get(id(kind))) is not None:
            require(not args and not kwargs, kind.__name__)
            self._stand_ins += 1
            return _Unbuilt(build, len(self._memo))
        if not isinstance(kind, type):
            raise MalformedError("it has another object in the place of a class")
        return self._call_listed(kind, kind.__new__, (kind, *args), kwargs)

    def _make_call(self, args: tuple) -> Call:
        if not self._is_call or self._call is not None:
            raise refused_value(_CALL, self.allowed)
        require(len(args) == 3 and type(args[1]) is tuple and type(args[2]) is dict, "a call")
        require(not args[2] or all(type(key) is str for key in args[2]), "a call")
        function = args[0]
        if type(function) is StandIn and function.name in CALLED_BY_THE_PACKAGE:
            assert function.construct is not None
            function = function.construct()
            self._stand_ins -= 1
        elif id(function) not in self._made:
            self.check_callable(function)
        self._call = Call(function, args[1], args[2])
        return self._call  # remains a stand-in until the end

    def _note_copy(self, value: Any) -> None:
        if type(value) is Call:
            raise refused_value(_CALL, self.allowed)
        self._stand_ins += 1

    # --- State ---

    def _build(self, value: Any, state: Any) -> Any:
        """BUILD: return `value` with the state."""
        self._charge_for(state)
        if type(value) is _Unbuilt:
            built = value.build(state)
            self._stand_ins -= 1
            index = value.memo_index
            if self._memo.get(index) is value:
                self._memo[index] = built
            return built
        if id(value) in self._made:
            self._set_state(value, state)
        elif type(value) in WITH_ATTRIBUTES and id(value) not in self._shared:
            require(type(state) is dict and all(type(name) is str for name in state), type(value).__name__)
            require(not any(hasattr(type(value), name) for name in state), type(value).__name__)
            vars(value).update(state)
        else:
            raise self._refuse_change(value, "set the state of")
        return value

    def _set_state(self, value: Any, state: Any) -> None:
        kind = type(value)
        setstate = getattr(kind, "__setstate__", None)
        if setstate is not None and setstate is not _SETSTATE_OF_EXCEPTIONS:
            self._runs_listed_code = True
            setstate(value, state)
            self._runs_listed_code = False
            return
        slots = None
        if type(state) is tuple and len(state) == 2:
            state, slots = state
        for names in (state, slots):
            if names and (type(names) is not dict or not all([type(name) is str for name in names])):
                raise MalformedError(f"the state of a {kind.__qualname__} in it is no dict with names")
        if state:
            attributes = object.__getattribute__(value, "__dict__")
            if type(attributes) is not dict:
                raise MalformedError(f"a {kind.__qualname__} has no attributes of its own")
            attributes.update({sys.intern(name): each for name, each in state.items()})
        for name, each in (slots or {}).items():
            slot = class_attribute(kind, name)
            if type(slot) is not types.MemberDescriptorType or not slot.__objclass__.__flags__ & _HEAP_TYPE:
                raise MalformedError(f"{kind.__qualname__} has no slot {shortened(name)}")
            slot.__set__(value, each)

    def _refuse_change(self, value: Any, what: str) -> NotAllowedError:
        kind = type(value).__qualname__
        return NotAllowedError(
            f"{self.allowed.worker} does not let a pickle {what} an object of type {kind} that is no plain container, "
            "and that the pickle has not made itself from a class that its allowed_functions have. If others may send "
            "such objects, list the class, and let its __new__ or __reduce__ return a new object each time.",
            self.allowed.worker,
        )

    # --- Containers ---

    def _add_items(self, target: Any, items: list[Any]) -> None:
        """SETITEM and SETITEMS: keys and values in turn."""
        kind = type(target)
        if len(items) % 2:
            raise MalformedError("a dict in it has a key without a value")
        is_own = id(target) in self._made
        if not is_own and (kind not in MAPPINGS or id(target) in self._shared):
            raise self._refuse_change(target, "add items to")
        self.checked_keys(items[::2])
        self._runs_listed_code = is_own
        for index in range(0, len(items), 2):
            target[items[index]] = items[index + 1]
        self._runs_listed_code = False

    def _extend(self, target: Any, items: list[Any]) -> None:
        """APPEND and APPENDS."""
        kind = type(target)
        if kind in SEQUENCES and id(target) not in self._shared:
            target.extend(items)
        elif id(target) in self._made:
            self._runs_listed_code = True
            if hasattr(kind, "extend"):
                kind.extend(target, items)
            else:
                for item in items:
                    kind.append(target, item)
            self._runs_listed_code = False
        else:
            raise self._refuse_change(target, "append to")

    def _update(self, target: Any, items: list[Any]) -> None:
        """ADDITEMS."""
        if type(target) is set and id(target) not in self._shared:
            target.update(self.checked_keys(items))
        elif id(target) in self._made:
            self.checked_keys(items)
            self._runs_listed_code = True
            for item in items:
                type(target).add(target, item)
            self._runs_listed_code = False
        else:
            raise self._refuse_change(target, "add elements to")

    def checked_keys(self, keys: list[Any]) -> list[Any]:
        """Return the keys of a dict or the elements of a set, after a check of the effort to hash them.

        A few bytes can create nested tuples that contain the same tuple very often, or that are very deep.
        """
        for key in keys:
            if type(key) in PLAIN_KEYS:
                if type(key) is int and key.bit_length() > _LARGE_KEY_BITS:  # Python does not cache its hash
                    self.charge(key.bit_length() // 8)
                continue
            effort, depth = self._key_effort(key)
            self._key_effort_left -= effort
            if depth > _DEEPEST_KEY or self._key_effort_left < 0:
                raise MalformedError("a key in it is nested too deeply, or too large for the number of its bytes")
        return keys

    def _key_effort(self, key: Any) -> tuple[int, int]:
        """Return how many objects a hash of the key visits, and how many tuples are nested in it."""
        efforts = self._key_efforts
        todo = [(key, False)]
        while todo:
            value, is_visited = todo.pop()
            parts = self._parts_of_key(value)
            if is_visited:
                found = [efforts[id(part)] for part in parts if id(part) in efforts]
                effort = 1 + len(parts) + sum(each[1] for each in found)
                # The hash of an instance is Python code, whose recursion Python checks.
                depth = 1 + max((each[2] for each in found), default=0) if isinstance(value, tuple) else 0
                efforts[id(value)] = value, effort, depth
            elif parts and id(value) not in efforts:
                efforts[id(value)] = value, 1, 0  # for instances that refer to themselves
                todo.append((value, True))
                todo += [(part, False) for part in parts if id(part) not in efforts]
        return efforts[id(key)][1:] if id(key) in efforts else (1, 0)

    def _parts_of_key(self, value: Any) -> Sequence[Any]:
        if isinstance(value, tuple):
            return value
        if id(value) in self._made and class_attribute(type(value), "__hash__") is not object.__hash__:
            attributes = getattr(value, "__dict__", None)
            return tuple(attributes.values()) if type(attributes) is dict else ()
        return ()

    def _check_depth(self, value: Any) -> None:
        """Raise if the value is nested so deeply that code which recurses over it might end the process."""
        todo, seen = [(value, 0)], set()
        while todo:
            value, depth = todo.pop()
            if depth > _DEEPEST_VALUE:
                raise MalformedError("it is nested too deeply")
            kind = type(value)
            parts: Any = ()
            if kind in MAPPINGS:
                parts = [*value.keys(), *value.values()]
            elif kind in (list, tuple, set, frozenset, collections.deque, Call):
                parts = value
            elif id(value) in self._made and type(getattr(value, "__dict__", None)) is dict:
                parts = value.__dict__.values()
            if parts and id(value) not in seen:
                seen.add(id(value))
                todo += [(part, depth + 1) for part in parts if type(part) not in PLAIN_KEYS]


# --- Opcodes: a handler takes the index of the byte after the opcode, and returns the index of the next opcode ---

_Handler = Callable[[LimitedUnpickler, int], int]
_HANDLERS: dict[int, _Handler] = {}
(_MEMOIZE,), (_BINGET,), (_STOP,) = pickle.MEMOIZE, pickle.BINGET, pickle.STOP
(_SHORT_BINUNICODE,), (_BININT1,) = pickle.SHORT_BINUNICODE, pickle.BININT1


def _handles(*opcodes: bytes) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        for (opcode,) in opcodes:
            _HANDLERS[opcode] = handler
        return handler

    return register


@_handles(pickle.PROTO)
def _proto(self: LimitedUnpickler, at: int) -> int:
    self._protocol = self._data[at]
    if not 2 <= self._protocol <= 5:
        raise MalformedError(f"it has protocol {self._protocol} of pickle instead of 2 to 5")
    return at + 1


@_handles(pickle.FRAME)
def _frame(self: LimitedUnpickler, at: int) -> int:
    self._take(at, 8)
    return at + 8


# Constants and numbers


def _constant(opcode: bytes, value: Any) -> None:
    @_handles(opcode)
    def push(self: LimitedUnpickler, at: int) -> int:
        self._stack.append(value)
        return at


for _opcode, _value in ((pickle.NONE, None), (pickle.NEWTRUE, True), (pickle.NEWFALSE, False)):
    _constant(_opcode, _value)


@_handles(pickle.EMPTY_TUPLE)
def _empty_tuple(self: LimitedUnpickler, at: int) -> int:
    self._stack.append(())
    return at


@_handles(pickle.BININT2)
def _binint2(self: LimitedUnpickler, at: int) -> int:
    self._stack.append(int.from_bytes(self._take(at, 2), "little"))
    return at + 2


@_handles(pickle.BININT)
def _binint(self: LimitedUnpickler, at: int) -> int:
    self._stack.append(int.from_bytes(self._take(at, 4), "little", signed=True))
    return at + 4


def _push_long(self: LimitedUnpickler, at: int, width: int) -> int:
    data, at = self._take_counted(at, width)
    if len(data) > _MOST_INT_BYTES:
        raise MalformedError(f"an int in it has more than {_MOST_INT_BYTES} bytes")
    self._stack.append(int.from_bytes(data, "little", signed=True))
    return at


@_handles(pickle.LONG1)
def _long1(self: LimitedUnpickler, at: int) -> int:
    return _push_long(self, at, 1)


@_handles(pickle.LONG4)
def _long4(self: LimitedUnpickler, at: int) -> int:
    return _push_long(self, at, 4)


@_handles(pickle.BINFLOAT)
def _binfloat(self: LimitedUnpickler, at: int) -> int:
    self._stack.append(struct.unpack(">d", self._take(at, 8))[0])
    return at + 8


# Texts and bytes


def _counted(opcode: bytes, width: int, convert: Callable[[bytes], Any]) -> None:
    @_handles(opcode)
    def push(self: LimitedUnpickler, at: int) -> int:
        data, at = self._take_counted(at, width)
        self._stack.append(convert(data))
        return at


for _opcode, _width, _convert in (
    (pickle.BINUNICODE, 4, lambda data: str(data, "utf-8", "surrogatepass")),
    (pickle.BINUNICODE8, 8, lambda data: str(data, "utf-8", "surrogatepass")),
    (pickle.SHORT_BINBYTES, 1, bytes),
    (pickle.BINBYTES, 4, bytes),
    (pickle.BINBYTES8, 8, bytes),
    (pickle.BYTEARRAY8, 8, bytearray),
):
    _counted(_opcode, _width, _convert)


@_handles(pickle.NEXT_BUFFER)
def _next_buffer(self: LimitedUnpickler, at: int) -> int:
    buffer = next(self._buffers, None)
    if buffer is None:
        raise MalformedError("it refers to a buffer that has not arrived")
    self._stack.append(buffer)
    return at


@_handles(pickle.READONLY_BUFFER)
def _readonly_buffer(self: LimitedUnpickler, at: int) -> int:
    buffer = self._stack[-1]
    if type(buffer) is not memoryview:
        raise MalformedError("it has another object in the place of a buffer")
    self._stack[-1] = buffer.toreadonly()
    return at


# The stack and the memo


@_handles(pickle.MARK)
def _mark(self: LimitedUnpickler, at: int) -> int:
    if len(self._outer) >= _DEEPEST_VALUE:
        raise MalformedError("it is nested too deeply")
    self._outer.append(self._stack)
    self._stack = []
    return at


def _pop_mark(self: LimitedUnpickler) -> list[Any]:
    items = self._stack
    self._stack = self._outer.pop()
    return items


@_handles(pickle.POP)
def _pop(self: LimitedUnpickler, at: int) -> int:  # written for tuples that contain themselves
    self._stack.pop()
    return at


@_handles(pickle.POP_MARK)
def _discard_to_mark(self: LimitedUnpickler, at: int) -> int:
    _pop_mark(self)
    return at


@_handles(pickle.BINPUT)
def _binput(self: LimitedUnpickler, at: int) -> int:
    self._memo[self._data[at]] = self._stack[-1]
    return at + 1


@_handles(pickle.LONG_BINPUT)
def _long_binput(self: LimitedUnpickler, at: int) -> int:
    self._memo[int.from_bytes(self._take(at, 4), "little")] = self._stack[-1]
    return at + 4


@_handles(pickle.LONG_BINGET)
def _long_binget(self: LimitedUnpickler, at: int) -> int:
    value = self._memo[int.from_bytes(self._take(at, 4), "little")]
    if type(value) in _STAND_INS:
        self._note_copy(value)
    self._stack.append(value)
    return at + 4


# Containers


@_handles(pickle.TUPLE)
def _tuple(self: LimitedUnpickler, at: int) -> int:
    items = _pop_mark(self)
    self._stack.append(tuple(items))
    return at


@_handles(pickle.TUPLE1)
def _tuple1(self: LimitedUnpickler, at: int) -> int:
    self._stack[-1] = (self._stack[-1],)
    return at


@_handles(pickle.TUPLE2)
def _tuple2(self: LimitedUnpickler, at: int) -> int:
    stack = self._stack
    last = stack.pop()
    stack[-1] = (stack[-1], last)
    return at


@_handles(pickle.TUPLE3)
def _tuple3(self: LimitedUnpickler, at: int) -> int:
    stack = self._stack
    last, middle = stack.pop(), stack.pop()
    stack[-1] = (stack[-1], middle, last)
    return at


def _empty(opcode: bytes, kind: type) -> None:
    @_handles(opcode)
    def push(self: LimitedUnpickler, at: int) -> int:
        self._stack.append(kind())
        return at


for _opcode, _empty_kind in ((pickle.EMPTY_LIST, list), (pickle.EMPTY_DICT, dict), (pickle.EMPTY_SET, set)):
    _empty(_opcode, _empty_kind)


@_handles(pickle.APPEND)
def _append(self: LimitedUnpickler, at: int) -> int:
    item = self._stack.pop()
    self._extend(self._stack[-1], [item])
    return at


@_handles(pickle.SETITEM)
def _setitem(self: LimitedUnpickler, at: int) -> int:
    value, key = self._stack.pop(), self._stack.pop()
    self._add_items(self._stack[-1], [key, value])
    return at


def _adds(opcode: bytes, add: Callable[[LimitedUnpickler, Any, list[Any]], None]) -> None:
    @_handles(opcode)
    def add_items(self: LimitedUnpickler, at: int) -> int:
        items = _pop_mark(self)
        add(self, self._stack[-1], items)
        return at


for _opcode, _add in (
    (pickle.APPENDS, LimitedUnpickler._extend),
    (pickle.SETITEMS, LimitedUnpickler._add_items),
    (pickle.ADDITEMS, LimitedUnpickler._update),
):
    _adds(_opcode, _add)


@_handles(pickle.FROZENSET)
def _frozenset(self: LimitedUnpickler, at: int) -> int:
    items = _pop_mark(self)
    self._stack.append(frozenset(self.checked_keys(items)))
    return at


# Names and objects


@_handles(pickle.GLOBAL)
def _global(self: LimitedUnpickler, at: int) -> int:  # protocols 2 and 3
    middle = self._data.index(b"\n", at)
    end = self._data.index(b"\n", middle + 1)
    self._push_global(str(self._data[at:middle], "utf-8"), str(self._data[middle + 1 : end], "utf-8"))
    return end + 1


@_handles(pickle.STACK_GLOBAL)
def _stack_global(self: LimitedUnpickler, at: int) -> int:
    name, module = self._stack.pop(), self._stack.pop()
    self._push_global(module, name)
    return at


@_handles(pickle.REDUCE)
def _reduce(self: LimitedUnpickler, at: int) -> int:
    args = self._stack.pop()
    self._stack[-1] = self._construct(self._stack[-1], args)
    return at


@_handles(pickle.NEWOBJ)
def _newobj(self: LimitedUnpickler, at: int) -> int:
    args = self._stack.pop()
    self._stack[-1] = self._make_object(self._stack[-1], args, {})
    return at


@_handles(pickle.NEWOBJ_EX)
def _newobj_ex(self: LimitedUnpickler, at: int) -> int:
    kwargs, args = self._stack.pop(), self._stack.pop()
    self._stack[-1] = self._make_object(self._stack[-1], args, kwargs)
    return at


@_handles(pickle.BUILD)
def _build(self: LimitedUnpickler, at: int) -> int:
    state = self._stack.pop()
    self._stack[-1] = self._build(self._stack[-1], state)
    return at


_TABLE: list[_Handler | None] = [_HANDLERS.get(opcode) for opcode in range(256)]
