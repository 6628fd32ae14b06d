"""A decorator for functions that are called remotely."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from torch.futures import Future

_P = ParamSpec("_P")
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class AsyncFunction(Protocol[_P, _T_co]):
    """The type of a function with `async_execution`: here it returns a future, by RPC the future's value."""

    _wrapped_async_rpc_function: "Callable[_P, Future[_T_co]]"

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> "Future[_T_co]": ...
    def __get__(self, instance: object, owner: type | None = None) -> "Callable[..., Future[_T_co]]": ...


def async_execution(fn: "Callable[_P, Future[_T]]") -> AsyncFunction[_P, _T]:
    """Decorator of a function that returns a `torch.futures.Future`: the caller gets the future's value.

    The callee's thread is free as soon as the function returns. The thread that completes the future sends the reply.
    Apply `staticmethod` or `classmethod` outside of this decorator. It works for `rpc_sync`, `rpc_async`, `remote` and
    for the proxies of an RRef.

    Raises (at the caller):
        RuntimeError: the function returned something that is not a future.

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
