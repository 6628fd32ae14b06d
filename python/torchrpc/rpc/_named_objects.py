"""Named objects: any worker finds an object by its name, whoever has registered it.

The owner of the object keeps an RRef to it under the name. So the object outlives the worker that has made or
registered it, and is lost with its owner only. The group's store says which worker owns a name, so that no two do; if
the store is lost with its process, lookups ask the workers. Any thread calls these functions.
"""

import threading
from typing import Any

from torch.distributed import Store

from torchrpc._C import PyRRef, _get_current_rpc_agent

from . import _calls
from ._checks import _check_initialized
from ._errors import NameNotFoundError, RpcError, WorkerLostError

_MOST_CHARACTERS = 256
_CLAIM = "named/"  # of keys of the store, whose values are names of workers; empty: nobody owns the name

_lock = threading.Lock()  # guards the two tables
_held: dict[str, PyRRef] = {}  # the objects of this worker
_owners: dict[str, str] = {}  # owners of names, as far as this worker has asked


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
    owner = rref.owner().name
    store = _store()
    while (holder := _claim(store, name, "", owner)) != owner:
        if holder and _asked(holder, name) is not None:
            raise _taken(name, holder)
        _claim(store, name, holder, "")  # it has ended, or was started again
    try:
        if owner == _self():
            _hold(name, rref)
        else:
            _calls.rpc_sync(owner, _hold, args=(name, rref))
    except BaseException as exc:
        if not isinstance(exc, ValueError):
            _claim(store, name, owner, "")
        raise
    with _lock:
        _owners[name] = owner


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
        known = _owners.get(name)
    if known and (found := _asked(known, name)) is not None:
        return found
    try:
        owner = _claim(_store(), name, "", "")
    except RpcError:
        return _asked_of_all(name)
    if owner and (found := _asked(owner, name, is_required=True)) is not None:
        with _lock:
            _owners[name] = owner
        return found
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
    owner = _claim(store, name, "", "")
    was_held = False
    if owner:
        try:
            was_held = _drop(name) if owner == _self() else _calls.rpc_sync(owner, _drop, args=(name,))
        except WorkerLostError:
            was_held = True
        _claim(store, name, owner, "")
    with _lock:
        _owners.pop(name, None)
    if not was_held:
        raise _not_found(name)


def forget_all() -> None:
    """Drop the objects that this worker keeps: its group has ended."""
    with _lock:
        dropped = [dict(_held), dict(_owners)]
        _held.clear()
        _owners.clear()
    del dropped  # without the lock: destructors of objects may run


# --- on the owner ---


def _hold(name: str, rref: PyRRef) -> None:
    """Runs on the owner: keeps the object under the name."""
    with _lock:
        if name not in _held:
            _held[name] = rref
            return
    raise _taken(name, _self())


def _find(name: str) -> Any:
    """Runs on the owner: returns its RRef, or None."""
    with _lock:
        return _held.get(name)


def _drop(name: str) -> bool:
    """Runs on the owner: whether it has dropped the object."""
    with _lock:
        dropped = _held.pop(name, None)
    return dropped is not None


# --- helpers ---


def _self() -> str:
    return _get_current_rpc_agent().get_worker_info().name


def _store() -> Store:
    _check_initialized()
    return _get_current_rpc_agent().store


def _claim(store: Store, name: str, expected: str, desired: str) -> str:
    """Replace the owner of a name if it is `expected`; return the owner. RpcError: the store is lost."""
    try:
        return store.compare_set(_CLAIM + name, expected, desired).decode()
    except Exception as exc:
        raise RpcError(f"the group's store, which knows who owns the name {name!r}, is lost: {exc}") from exc


def _asked(owner: str, name: str, is_required: bool = False) -> Any:
    """Return the owner's RRef of that name, or None: it has none or, unless that is an error, cannot be reached."""
    if owner == _self():
        return _find(name)
    try:
        return _calls.rpc_sync(owner, _find, args=(name,))
    except RpcError as exc:
        if not is_required:
            return None
        if not isinstance(exc, WorkerLostError):
            return None  # it is no member any more
        raise WorkerLostError(
            f"the object named {name!r} is lost with its owner {owner}. Register another one.", owner
        ) from exc


def _asked_of_all(name: str) -> Any:
    """Return the RRef of whichever worker has that name."""
    me = _get_current_rpc_agent().get_worker_info()
    if (found := _find(name)) is not None:
        return found
    others = [worker.name for worker in _get_current_rpc_agent().get_worker_infos() if worker != me]
    answers = [(other, _calls.rpc_async(other, _find, args=(name,))) for other in others]
    for other, answer in answers:
        try:
            found = answer.wait()
        except RpcError:  # that worker is lost
            continue
        if found is not None:
            with _lock:
                _owners[name] = other
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
