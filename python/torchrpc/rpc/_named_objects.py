"""Named objects: any worker finds an object by its name, whoever has registered it.

The owner of the object keeps an RRef to it under the name. So the object outlives the worker that has made or
registered it, and is lost with its owner only. The group's store says which registration has a name, so that no two do;
if the store is lost with its process, lookups ask the workers. Any thread calls these functions.

A registration has a number of its own. Its object is held by the owner before the store names the registration, so
a registration that the store names and the owner does not hold has ended, and may be replaced by a compare-and-set.
"""

import contextlib
import secrets
import threading
from typing import Any, NamedTuple

from torch.distributed import Store

from torchrpc._C import PyRRef, _get_current_rpc_agent

from . import _calls
from ._checks import _check_initialized
from ._errors import NameNotFoundError, RpcError, WorkerLostError

_MOST_CHARACTERS = 256
_KEY = "named/"  # of keys of the store, whose values are registrations; empty: nobody has the name


class _Registration(NamedTuple):
    """One registration of a name: as a value of the store, "NUMBER OWNER"."""

    number: str
    owner: str

    @classmethod
    def parse(cls, value: str) -> "_Registration | None":
        number, _, owner = value.partition(" ")
        return cls(number, owner) if owner else None

    def __str__(self) -> str:
        return f"{self.number} {self.owner}"


_lock = threading.Lock()  # guards the two tables
_held: dict[str, dict[str, PyRRef]] = {}  # the objects of this worker: by name, then by number of the registration
_found: dict[str, _Registration] = {}  # what this worker has asked the store for


def register(name: str, rref: PyRRef) -> None:
    """Give the object that an RRef refers to a name, under which every worker of the group finds it by `lookup`.

    The object stays on its owner, which keeps it until `unregister`, or until the owner ends. It outlives this worker
    and all RRefs to it. Blocks for two messages. Any thread may call it; of several workers that register one name at
    the same time, one succeeds.

    Args:
        name (str): 1 to 256 characters.
        rref (RRef): to an object of any worker of the group.

    Raises:
        ValueError: another object has the name; the text says on which worker. Or the name is empty or too long.
        TypeError: an argument of another type.
        WorkerLostError: the owner is lost.
        RpcError: the group's store has been lost with its process.
        ShutdownError: RPC is not initialized.

    Example:
        >>> torchrpc.register("replay", rpc.remote("worker1", list, args=([1, 2],)))
        >>> torchrpc.lookup("replay").rpc_sync().count(2)
        1
        >>> torchrpc.unregister("replay")
    """
    _check_name(name)
    if not isinstance(rref, PyRRef):
        raise TypeError(
            f"register: rref must be an RRef, but is a {type(rref).__name__}. Wrap the object: RRef(object)."
        )
    mine = _Registration(secrets.token_hex(8), rref.owner().name)
    store = _store()
    _on_owner(mine, _hold, name, mine.number, rref)
    try:
        _take(store, name, mine)
    except BaseException:
        with contextlib.suppress(RpcError):  # a lost owner holds nothing
            _on_owner(mine, _drop, name, mine.number)
        raise
    with _lock:
        _found[name] = mine


def lookup(name: str) -> Any:
    """Return an RRef to the object of that name.

    Blocks for a message or two; where the group's store is lost, for one to each worker. Any thread may call it.

    Raises:
        NameNotFoundError: there is no object of that name.
        WorkerLostError: its owner is lost, and the object with it. Register another one.
        TypeError, ValueError: the name is no str, or empty, or too long.
        ShutdownError: RPC is not initialized.
    """
    _check_name(name)
    with _lock:
        known = _found.get(name)
    if known and (rref := _asked(known, name)) is not None:
        return rref
    try:
        named = _named_by(_store(), name)
    except RpcError:
        return _asked_of_all(name)
    if named and (rref := _asked(named, name, is_required=True)) is not None:
        with _lock:
            _found[name] = named
        return rref
    raise _not_found(name)


def unregister(name: str) -> None:
    """Remove a name. The object is freed when no worker has an RRef to it any more. Any thread may call it.

    Raises:
        NameNotFoundError: there is no object of that name.
        RpcError: the group's store has been lost with its process.
        TypeError, ValueError, ShutdownError: as `lookup`.
    """
    _check_name(name)
    store = _store()
    named = _named_by(store, name)
    was_held = False
    if named:
        try:
            was_held = _on_owner(named, _drop, name, named.number)
        except WorkerLostError:
            was_held = True
        _replace(store, name, str(named), "")
    with _lock:
        _found.pop(name, None)
    if not was_held:
        raise _not_found(name)


def forget_all() -> None:
    """Drop the objects that this worker keeps: its group has ended."""
    with _lock:
        dropped = dict(_held)
        _held.clear()
        _found.clear()
    del dropped  # without the lock: destructors of objects may run


# --- on the owner ---


def _hold(name: str, number: str, rref: PyRRef) -> None:
    """Runs on the owner: keeps the object for a registration of the name."""
    with _lock:
        _held.setdefault(name, {})[number] = rref


def _find(name: str, number: str | None) -> Any:
    """Runs on the owner: returns the RRef of that registration, or of any if no number is given; or None."""
    with _lock:
        held = _held.get(name, {})
        return held.get(number) if number is not None else next(iter(held.values()), None)


def _drop(name: str, number: str) -> bool:
    """Runs on the owner: whether it has dropped the object."""
    with _lock:
        held = _held.get(name, {})
        dropped = held.pop(number, None)
        if not held:
            _held.pop(name, None)
    return dropped is not None


# --- helpers ---


def _self() -> str:
    return _get_current_rpc_agent().get_worker_info().name


def _store() -> Store:
    _check_initialized()
    return _get_current_rpc_agent().store


def _replace(store: Store, name: str, expected: str, desired: str) -> str:
    """Replace what the store has for a name if it is `expected`; return what it has. RpcError: the store is lost."""
    try:
        return store.compare_set(_KEY + name, expected, desired).decode()
    except Exception as exc:
        raise RpcError(f"the group's store, which knows who owns the name {name!r}, is lost: {exc}") from exc


def _named_by(store: Store, name: str) -> _Registration | None:
    """Return the registration that the store has for a name. RpcError: the store is lost."""
    return _Registration.parse(_replace(store, name, "", ""))


def _take(store: Store, name: str, mine: _Registration) -> None:
    """Let the store name this registration. ValueError: it names another one, whose object is there."""
    expected = ""
    while (value := _replace(store, name, expected, str(mine))) != str(mine):
        other = _Registration.parse(value)
        if other and _asked(other, name) is not None:
            raise _taken(name, other.owner)
        expected = value  # its owner has ended or was started again


def _on_owner(registration: _Registration, function: Any, *args: Any) -> Any:
    if registration.owner == _self():
        return function(*args)
    return _calls.rpc_sync(registration.owner, function, args=args)


def _asked(registration: _Registration, name: str, is_required: bool = False) -> Any:
    """Return the owner's RRef of that registration, or None: it has none or, unless that is an error, is lost."""
    try:
        return _on_owner(registration, _find, name, registration.number)
    except RpcError as exc:
        if not is_required:
            return None
        if not isinstance(exc, WorkerLostError):
            return None  # it is no member any more
        raise WorkerLostError(
            f"the object named {name!r} is lost with its owner {registration.owner}. Register another one.",
            registration.owner,
        ) from exc


def _asked_of_all(name: str) -> Any:
    """Return the RRef of whichever worker has that name."""
    me = _get_current_rpc_agent().get_worker_info()
    if (found := _find(name, None)) is not None:
        return found
    others = [worker.name for worker in _get_current_rpc_agent().get_worker_infos() if worker != me]
    answers = [_calls.rpc_async(other, _find, args=(name, None)) for other in others]
    for answer in answers:
        try:
            found = answer.wait()
        except RpcError:  # that worker is lost
            continue
        if found is not None:
            return found
    raise _not_found(name)


def _check_name(name: Any) -> None:
    _check_initialized()
    if not isinstance(name, str):
        raise TypeError(f"the name of an object must be a str, but is a {type(name).__name__}: {name!r}.")
    if not 1 <= len(name) <= _MOST_CHARACTERS:
        raise ValueError(f"the name of an object must have 1 to {_MOST_CHARACTERS} characters, but has {len(name)}.")


def _taken(name: str, owner: str) -> ValueError:
    return ValueError(f"the name {name!r} belongs to an object of {owner}: unregister it first, or take another name.")


def _not_found(name: str) -> NameNotFoundError:
    return NameNotFoundError(
        f"no worker of the group of {_self()} has an object named {name!r}. A worker registers one by "
        "torchrpc.register(name, rref); a worker that was started again has none."
    )
