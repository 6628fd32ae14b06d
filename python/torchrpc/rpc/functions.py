"""Decorators for functions that are called remotely."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from torchrpc._C import _ServedCall

if TYPE_CHECKING:
    from torch.futures import Future

_P = ParamSpec("_P")
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_F = TypeVar("_F", bound=Callable[..., Any])


class AsyncFunction(Protocol[_P, _T_co]):
    """The type of a function with `async_execution`: a direct call returns a future, an RPC the future's value."""

    _wrapped_async_rpc_function: "Callable[_P, Future[_T_co]]"

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> "Future[_T_co]": ...
    def __get__(self, instance: object, owner: type | None = None) -> "Callable[..., Future[_T_co]]": ...


def async_execution(fn: "Callable[_P, Future[_T]]") -> AsyncFunction[_P, _T]:
    """Decorator of a function that returns a `torch.futures.Future`: the caller gets the future's value.

    The callee's thread is free as soon as the function returns. The thread that completes the future sends the reply.
    Apply `staticmethod` or `classmethod` outside of this decorator. It works for `rpc_sync`, `rpc_async`, `remote` and
    for the proxies of an RRef. When the caller does not wait any more, because of a time-out for example, nobody needs
    the future's value: the future stays as it is, and `shutdown` does not wait for it.

    Raises (at the caller):
        RuntimeError: the function returned something that is not a future, or a future that was destroyed before it had
            a result.

    Example:
        >>> @rpc.functions.async_execution
        ... def add_there(to, x, y, z):
        ...     return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda fut: fut.wait() + z)
        >>> rpc.rpc_sync("worker1", add_there, args=("worker2", torch.ones(2), 1, 2))
        tensor([4., 4.])
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def cancelled() -> bool:
    """Whether nobody waits any more for the result of the call that this thread serves.

    It is true when the caller has cancelled the call (`Future.cancel()`, or the end of the asyncio task that awaited
    it), when the call has timed out at its caller, and when the caller is lost. A function that runs for long can ask
    from time to time, and return early. It is False for a call that may be repeated (`retries`, `idempotency_key`),
    whose result a later attempt may need, and on threads that serve no call, such as those that the function starts.
    A coroutine need not ask: `asyncio.CancelledError` is raised where it awaits.

    Example:
        >>> def train(epochs):
        ...     for epoch in range(epochs):
        ...         if torchrpc.cancelled():
        ...             return
        ...         train_one_epoch()
    """
    return _ServedCall().is_cancelled()


def restorable(fn: _F) -> _F:
    """Decorator: values that `remote` creates with this function are created again after a restart of their owner.

    Args:
        fn (Callable): a function or class that the owner can import. Its arguments contain no RRefs. It should return
            the value that is wanted after a restart: changes that were made in the old process are gone, unless `fn`
            reads them from a checkpoint.

    While the owner is lost, uses of an RRef to such a value raise WorkerLostError. When a new process has taken the
    owner's place, the worker that called `remote` calls `fn` there again, with a copy of the arguments of the first
    call. From then on its RRef, and the RRefs of all workers that have received it, refer to the new value. If that
    worker has ended, or has dropped its RRef, the value stays lost.

    Raises:
        TypeError: `fn` is not a Python function or class.

    Any thread may call it.

    Example:
        >>> @torchrpc.restorable
        ... def make_shard(size):
        ...     return torch.zeros(size)  # or that of the latest checkpoint
        >>> rpc.remote("worker1", make_shard, args=(2,)).to_here()
        tensor([0., 0.])
    """
    try:
        vars(fn)
        fn._torchrpc_restorable = True  # type: ignore[attr-defined]
    except (TypeError, AttributeError):
        raise TypeError(
            f"restorable takes a Python function or class, but was given {fn!r}. Call it in a function of your own."
        ) from None
    return fn
