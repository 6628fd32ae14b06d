"""The three ways to call a function on another worker, and the block that waits for its asynchronous calls.

Any thread may call these functions. They belong to `api`, which is their `__module__`.
"""

import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import torch

from torchrpc._C import (
    WorkerInfo,
    _call_async,
    _call_async_repeatedly,
    _call_remote,
    _call_remote_repeatedly,
    _call_sync,
    _call_sync_repeatedly,
    _calls_are_shown,
)

from ..constants import UNSET_RPC_TIMEOUT
from ..functions import AsyncFunction
from ..internal import RPCExecMode
from .futures import Future
from .profiling import call_shown
from .retries import Key, Retries, repetition_of

if TYPE_CHECKING:
    from ..api import RRef

_T = TypeVar("_T")
_To: TypeAlias = str | int | WorkerInfo
_Args: TypeAlias = Iterable[Any] | None
_Kwargs: TypeAlias = Mapping[str, Any] | None
_CoroutineFunction: TypeAlias = Callable[..., Coroutine[Any, Any, _T]]

thread_local = threading.local()  # `future_list`: the futures of the thread's innermost _wait_all() block
_open_blocks: list[None] = []  # an item for each _wait_all() block of any thread; keeps calls outside of blocks fast


def _repeated(mode: RPCExecMode, call: Callable[..., Any], repetition: tuple[Any, ...], *arguments: Any) -> Any:
    """Make a call that may be repeated. `call` is a function of the extension."""

    def send(*values: Any) -> Any:
        return call(*values, repetition)

    return call_shown(mode, send, *arguments) if _calls_are_shown() else send(*arguments)


@overload
def rpc_sync(
    to: _To,
    func: AsyncFunction[..., _T],
    args: _Args = None,
    kwargs: _Kwargs = None,
    timeout: float = ...,
    *,
    retries: Retries = ...,
    idempotency_key: Key = ...,
) -> _T: ...
@overload
def rpc_sync(
    to: _To,
    func: _CoroutineFunction[_T],
    args: _Args = None,
    kwargs: _Kwargs = None,
    timeout: float = ...,
    *,
    retries: Retries = ...,
    idempotency_key: Key = ...,
) -> _T: ...
@overload
def rpc_sync(
    to: _To,
    func: Callable[..., _T],
    args: _Args = None,
    kwargs: _Kwargs = None,
    timeout: float = ...,
    *,
    retries: Retries = ...,
    idempotency_key: Key = ...,
) -> _T: ...
def rpc_sync(
    to: _To,
    func: Callable[..., Any],
    args: _Args = None,
    kwargs: _Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: Retries = 0,
    idempotency_key: Key = None,
) -> Any:
    """Run `func(*args, **kwargs)` on the worker `to` and return its result.

    Args:
        to (str, int or WorkerInfo): name, rank or info of the worker; this worker itself is allowed.
        func (Callable): a torch operator, a script function or a `torchrpc.cpp_function` (these run on the callee
            without the GIL), a function or class that `to` can import, a method of a picklable object, a lambda or a
            nested function (sent as code: its globals resolve on the callee, in the module of the same name).
            Functions and classes of a notebook are sent by value, if cloudpickle is installed. All `async def`
            functions run on one asyncio event loop of the callee; the result of the call is the value that they return.
        args (tuple): picklable objects, RRefs, and CPU tensors of any shape, dtype and layout. Tensors are not copied
            before they are sent.
        kwargs (dict): keyword arguments; the same objects.
        timeout (float): seconds until the call fails with RpcTimeoutError; 0: no limit; default: the group's time-out.
        retries (int or RetryPolicy): how often the call may be sent again if the worker is lost before it has answered.
            The worker runs the function once, however often the call arrives. By default a call is sent once. A call
            with RRefs among its arguments cannot have retries.
        idempotency_key (str or bytes): a name for this call, 1 to 256 bytes. The callee does not run two calls of this
            worker with the same key: until ten minutes after the first answer, a call with the same key, function and
            arguments gets the result or the exception of the first call. Pass the same key when you repeat a call
            yourself.

    Raises:
        RpcTimeoutError: the call timed out.
        WorkerLostError: the worker is lost.
        SerializationError: an argument or the result cannot be sent.
        NotAllowedError, NameNotFoundError: the callee does not let others run `func`, or does not have it.
        ShutdownError: RPC is not initialized, or the callee has shut down.
        RpcError: the group has no such worker; also the base class of the errors above.
        TypeError, ValueError: arguments of the wrong kind.
        RuntimeError: the key belongs to another call, or the result of the first call cannot be sent again.
        Exception: the exception that `func` raised, with its type, and the remote traceback in its text.

    Any thread may call it.

    Example:
        >>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3), timeout=10)
        tensor([4., 4.])
    """
    if retries or idempotency_key is not None:
        repetition = repetition_of(retries, idempotency_key)
        return _repeated(RPCExecMode.SYNC, _call_sync_repeatedly, repetition, to, func, args, kwargs, timeout)
    if _calls_are_shown():
        return call_shown(RPCExecMode.SYNC, _call_sync, to, func, args, kwargs, timeout)
    return _call_sync(to, func, args, kwargs, timeout)


@overload
def rpc_async(
    to: _To,
    func: AsyncFunction[..., _T],
    args: _Args = None,
    kwargs: _Kwargs = None,
    timeout: float = ...,
    *,
    retries: Retries = ...,
    idempotency_key: Key = ...,
) -> Future[_T]: ...
@overload
def rpc_async(
    to: _To,
    func: _CoroutineFunction[_T],
    args: _Args = None,
    kwargs: _Kwargs = None,
    timeout: float = ...,
    *,
    retries: Retries = ...,
    idempotency_key: Key = ...,
) -> Future[_T]: ...
@overload
def rpc_async(
    to: _To,
    func: Callable[..., _T],
    args: _Args = None,
    kwargs: _Kwargs = None,
    timeout: float = ...,
    *,
    retries: Retries = ...,
    idempotency_key: Key = ...,
) -> Future[_T]: ...
def rpc_async(
    to: _To,
    func: Callable[..., Any],
    args: _Args = None,
    kwargs: _Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: Retries = 0,
    idempotency_key: Key = None,
) -> Any:
    """Like `rpc_sync`, but return at once, with a `torch.futures.Future` of the result.

    `future.wait()`, or `await future` in a coroutine, returns the result or raises the call's error. Do not change
    tensors that you sent until the future is complete. Any thread may call this function and wait for the future.
    Callbacks of the future (`then`) run on a thread of the pool or on a thread that waits for it.

    Raises:
        RpcError, TypeError, ValueError: as `rpc_sync`, for arguments that cannot be sent. The future raises later
            errors.

    Example:
        >>> futures = [rpc.rpc_async(to, torch.add, args=(torch.ones(2), 1)) for to in ("worker1", "worker2")]
        >>> torch.futures.wait_all(futures)
        [tensor([2., 2.]), tensor([2., 2.])]
    """
    if retries or idempotency_key is not None:
        repetition = repetition_of(retries, idempotency_key)
        future = _repeated(RPCExecMode.ASYNC, _call_async_repeatedly, repetition, to, func, args, kwargs, timeout)
    elif _calls_are_shown():
        future = call_shown(RPCExecMode.ASYNC, _call_async, to, func, args, kwargs, timeout)
    else:
        future = _call_async(to, func, args, kwargs, timeout)
    if _open_blocks and hasattr(thread_local, "future_list"):
        thread_local.future_list.append(future)
    return future


@overload
def remote(
    to: _To,
    func: AsyncFunction[..., _T],
    args: _Args = None,
    kwargs: _Kwargs = None,
    timeout: float = ...,
    *,
    idempotency_key: Key = ...,
) -> "RRef[_T]": ...
@overload
def remote(
    to: _To,
    func: _CoroutineFunction[_T],
    args: _Args = None,
    kwargs: _Kwargs = None,
    timeout: float = ...,
    *,
    idempotency_key: Key = ...,
) -> "RRef[_T]": ...
@overload
def remote(
    to: _To,
    func: Callable[..., _T],
    args: _Args = None,
    kwargs: _Kwargs = None,
    timeout: float = ...,
    *,
    idempotency_key: Key = ...,
) -> "RRef[_T]": ...
def remote(
    to: _To,
    func: Callable[..., Any],
    args: _Args = None,
    kwargs: _Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    idempotency_key: Key = None,
) -> Any:
    """Run `func` (often a class) on the worker `to`, keep the result there, and return an RRef to it at once.

    The arguments are those of `rpc_sync`, without `retries`: an RRef is lost with the connection on which it was made.
    With an `idempotency_key` you can repeat the call yourself: while any worker holds an RRef to the object of the
    first call, the second call returns an RRef to the same object. An error, a time-out included, is raised when the
    RRef is used. Any thread may call it.

    Raises:
        RpcError, TypeError, ValueError: as `rpc_sync`, for arguments that cannot be sent.

    Example:
        >>> layer = rpc.remote("worker1", torch.nn.Linear, args=(4, 2))
        >>> layer.rpc_sync().forward(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    if idempotency_key is not None:
        repetition = repetition_of(0, idempotency_key)
        return _repeated(RPCExecMode.REMOTE, _call_remote_repeatedly, repetition, to, func, args, kwargs, timeout)
    if _calls_are_shown():
        return call_shown(RPCExecMode.REMOTE, _call_remote, to, func, args, kwargs, timeout)
    return _call_remote(to, func, args, kwargs, timeout)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """At the end of the block, wait for all calls that this thread made in it by `rpc_async`; raise the first error."""
    thread_local.future_list = []
    _open_blocks.append(None)
    try:
        yield
    finally:
        _open_blocks.pop()
        try:
            torch.futures.wait_all(thread_local.future_list)
        finally:
            del thread_local.future_list


# Pickles, allow-lists and tracebacks name these functions by the module `api`, as upstream does.
for _function in (rpc_sync, rpc_async, remote, _wait_all):
    _function.__module__ = "torchrpc.rpc.api"
