"""The exceptions of this package. Programs catch them by these names; every one is also a RuntimeError, as in torch.

No module is imported here, because all others import this one.
"""

from typing import Any

ORIGINAL_TYPE = "_torchrpc_original_type"  # attribute of a class that was made here: the type, or two, to send instead


class RpcError(RuntimeError):
    """The base of all errors of this package: a call could not be made, or its result did not arrive.

    An exception that a called function raises arrives with its own type instead.

    Attributes:
        worker (str): the name of the worker concerned; empty if there is none.
    """

    __module__ = "torchrpc.rpc"

    def __init__(self, text: str = "", worker: str = "") -> None:
        super().__init__(text)
        self.worker = worker


class RpcTimeoutError(RpcError, TimeoutError):
    """A call, a value or `shutdown` took longer than its time-out. A called function may still run."""

    __module__ = "torchrpc.rpc"


class WorkerLostError(RpcError):
    """A worker with outstanding requests has died, is stopped or cannot be reached; the text says which, and why.

    Raised by everything that depends on the worker: calls, RRefs that it owns, backward passes, optimizer steps,
    `shutdown`.

    Attributes:
        worker (str): the name of the lost worker.
    """

    __module__ = "torchrpc.rpc"


class NotAllowedError(RpcError):
    """The callee's `allowed_functions` do not contain a function, an operator or a class that a caller sent."""

    __module__ = "torchrpc.rpc"


class QuotaExceededError(RpcError):
    """The callee's `quotas` grant this caller no more calls, bytes, RRefs or connections at a time."""

    __module__ = "torchrpc.rpc"


class CancelledError(RpcError):
    """The call was cancelled, or a call for which the called function was waiting."""

    __module__ = "torchrpc.rpc"


class ArgumentMismatchError(RpcError, TypeError):
    """A C++ function does not take the arguments of the call: their number or types; the text names the argument."""

    __module__ = "torchrpc.rpc"


class NameNotFoundError(RpcError):
    """The receiver has no module, function or class of the received name.

    If the error occurs while a message is unpickled, it is also an AttributeError or a ModuleNotFoundError.
    """

    __module__ = "torchrpc.rpc"


class RemoteException(RpcError):
    """A called function has raised an exception whose class this worker cannot import, or that is no Exception.

    For example a class that is defined in a function, or SystemExit. The text has the traceback of the callee.

    Attributes:
        type_name (str): the class with its module: "package.module.Class"; empty if it is unknown.
        message (str): the str() of the exception.
        traceback (str): the traceback of the callee; empty for causes and contexts.
    """

    __module__ = "torchrpc.rpc"

    def __init__(
        self, text: str = "", worker: str = "", type_name: str = "", message: str = "", traceback: str = ""
    ) -> None:
        super().__init__(text, worker)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback


class RendezvousError(RpcError):
    """The group could not be formed: a worker is missing, or ranks, names or addresses do not fit."""

    __module__ = "torchrpc.rpc"


class ShutdownError(RpcError):
    """RPC is not running in this process, or has ended here or on the callee before the call was complete."""

    __module__ = "torchrpc.rpc"


class SerializationError(RpcError):
    """A value cannot be sent, or is too large. The error is also of the type that pickle raised, if it raised one.

    The text names the argument, or the variable that a lambda captures.
    """

    __module__ = "torchrpc.rpc"


_made: dict[tuple[type, type], type[Any]] = {}


def also(cls: type[RpcError], kind: type[BaseException]) -> type[Any]:
    """Return a subclass of `cls` and `kind` with the name of `cls`. Return `cls` if it is a subclass of `kind`, or if
    the two cannot be combined.

    Other workers receive the pair `(cls, kind)` instead of the subclass.
    """
    if issubclass(cls, kind):
        return cls
    if (cls, kind) not in _made:
        try:
            members = {"__module__": cls.__module__, ORIGINAL_TYPE: (cls, kind)}
            _made[cls, kind] = type(cls.__name__, (cls, kind), members)
        except TypeError:  # the instance layouts of the two classes conflict
            _made[cls, kind] = cls
    return _made[cls, kind]
