"""Checks of a call's arguments. The extension calls `check_call` for arguments of less common types."""

import math
import numbers
import reprlib
from collections.abc import Iterator, Mapping, Sequence, Set, ValuesView
from typing import Any

from torchrpc._C import WorkerInfo, _caller, _forked_from, _get_current_rpc_agent, _is_current_rpc_agent_set

from .._errors import NotAllowedError, ShutdownError
from .._values.names import public_module, shortened
from ..constants import UNSET_RPC_TIMEOUT


def _check_initialized() -> None:
    """Raise ShutdownError unless `init_rpc` has been called."""
    if not _is_current_rpc_agent_set():
        raise ShutdownError(
            f"RPC has not been initialized. Call {public_module('rpc')}.init_rpc first, and make calls before "
            f"shutdown().{_forked_from()}"
        )


def _to_worker_info(to: Any) -> Any:
    """Return the WorkerInfo of a name, rank or WorkerInfo. Raises RpcError, or ValueError for another type."""
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, str):
        return _get_current_rpc_agent().get_worker_info(to)
    if isinstance(to, numbers.Integral):
        return _get_current_rpc_agent().get_worker_info(int(to))
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


def check_caller(worker: str | int) -> None:
    """Raise NotAllowedError if this thread serves a call of another worker than the one with this name or id.

    Functions of the package that act on behalf of a worker call it: a worker may act only for itself.
    """
    caller = _caller()
    if caller is None or worker == (caller.id if isinstance(worker, int) else caller.name):
        return
    me = _get_current_rpc_agent().get_worker_info().name
    named = f"the worker with id {worker}" if isinstance(worker, int) else shortened(worker)
    raise NotAllowedError(f"{me} does not let {caller.name} speak for {named}: a worker speaks only for itself.", me)


# Types whose items are arguments. Text, tensors, arrays, dicts and modules can be iterated over, too, but in place of a
# tuple they are one argument that was written without its tuple.
_LISTS_OF_ARGUMENTS = (Sequence, Iterator, Set, ValuesView)
_ONE_ARGUMENT = (str, bytes, bytearray, memoryview)


def check_arguments(args: Any, kwargs: Any) -> tuple[tuple, dict]:
    """Return the positional arguments as a tuple and the keyword arguments as a dict.

    Raises:
        TypeError: an argument of the wrong kind; the text says how to write it.
    """
    if args is None or (isinstance(args, dict) and not args):
        args = ()
    elif not isinstance(args, _LISTS_OF_ARGUMENTS) or isinstance(args, _ONE_ARGUMENT):
        shown = reprlib.repr(args) if isinstance(args, (*_ONE_ARGUMENT, numbers.Number)) else "x"
        raise TypeError(
            f"args must be a tuple or a list of positional arguments, but is a {type(args).__name__}. For one argument "
            f"write args=({shown},)."
        )
    if kwargs is None:
        kwargs = {}
    elif not isinstance(kwargs, Mapping):
        raise TypeError(
            f'kwargs must be a dict of keyword arguments, but is a {type(kwargs).__name__}. Write kwargs={{"name": x}}.'
        )
    return tuple(args), dict(kwargs)


def check_seconds(timeout: Any, advice: str) -> None:
    """Check a time-out; `advice`: what 0 means, and how to get the default.

    Raises:
        TypeError, ValueError: no number of seconds, or a negative one.
    """
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds, but is a {type(timeout).__name__}: {timeout!r}.")
    if not float(timeout) >= 0:
        raise ValueError(f"timeout must not be negative, but is {timeout}. {advice}")


def check_count(name: str, value: Any, limit: float = math.inf) -> None:
    """Check that an argument of that name is an int from 1 to `limit`.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, but is a {type(value).__name__}: {value!r}.")
    if int(value) < 1:
        raise ValueError(f"{name} must be at least 1, but is {value}.")
    if int(value) > limit:
        raise ValueError(f"{name} must be at most {limit}, but is {value}.")


def check_call(to: Any, func: Any, args: Any, kwargs: Any, timeout: Any) -> tuple[Any, tuple, dict]:
    """Return the worker's info, the positional arguments as a tuple, and the keyword arguments as a dict.

    Raises:
        TypeError, ValueError: an argument of the wrong kind; the text names it.
        ShutdownError: RPC is not initialized.
        RpcError: the group has no such worker.
    """
    _check_initialized()
    if not callable(func):
        raise TypeError("function should be callable.")
    worker = _to_worker_info(to)
    positional, keywords = check_arguments(args, kwargs)
    if timeout != UNSET_RPC_TIMEOUT:
        check_seconds(timeout, "0: no limit; leave it out for the default.")
    return worker, positional, keywords
