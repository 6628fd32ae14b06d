"""Named objects: any worker finds an object by its name, whichever worker has registered it.

The core implements them (csrc/node/named_objects.h), also for C++ programs. Any thread may call these functions.
"""

from typing import TYPE_CHECKING, Any

from torchrpc._C import PyRRef, _lookup_object, _register_object, _unregister_object

from .checks import _check_initialized

if TYPE_CHECKING:
    from ..api import RRef


def register(name: str, rref: "RRef[Any]") -> None:
    """Register the object of an RRef under a name, so that every worker of the group can find it with `lookup`.

    The object stays on its owner, which keeps it until `unregister`, or until the owner ends. It outlives this worker
    and all RRefs to it. This function blocks for two messages. Any thread may call it. If several workers register the
    same name at the same time, one succeeds. C++ workers find the object with `NodeRef::lookup`.

    Args:
        name (str): 1 to 256 characters.
        rref (RRef): refers to an object on any worker of the group.

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
    _register_object(name, rref)


def lookup(name: str) -> "RRef[Any]":
    """Return an RRef to the object of that name.

    Blocks for one or two messages; if the group's store is lost, for one to each worker. Any thread may call it.

    Raises:
        NameNotFoundError: there is no object of that name.
        WorkerLostError: its owner is lost, and the object with it. Register another one.
        TypeError, ValueError: the name is not a str, or is empty or too long.
        ShutdownError: RPC is not initialized.
    """
    _check_name(name)
    return _lookup_object(name)


def unregister(name: str) -> None:
    """Remove a name. The object is freed when no worker has an RRef to it any more. Any thread may call it.

    Raises:
        NameNotFoundError: there is no object of that name.
        RpcError: the group's store has been lost with its process.
        TypeError, ValueError, ShutdownError: as `lookup`.
    """
    _check_name(name)
    _unregister_object(name)


def _check_name(name: Any) -> None:
    _check_initialized()
    if not isinstance(name, str):
        raise TypeError(f"the name of an object must be a str, but is a {type(name).__name__}: {name!r}.")
