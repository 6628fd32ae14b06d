"""Extensions of torch's futures: any asyncio event loop can await them, they can be cancelled, and Ctrl-C interrupts a
wait.

A future completes on any thread, which notifies the event loop by call_soon_threadsafe.
"""

import asyncio
import contextlib
import functools
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchrpc._C import (
    _cancel_future,
    _mark_future_dependent,
    _mark_future_seen,
    _repr_of_future,
    _wait_for_future,
    _wait_for_futures,
)

_T = TypeVar("_T")

if TYPE_CHECKING:

    class Future(torch.futures.Future[_T]):
        """The type that `rpc_async` returns. torch's annotations do not say that a future can be awaited."""

        def __await__(self) -> Generator[Any, None, _T]: ...
        def cancel(self) -> bool: ...

        # A collections.abc.Coroutine, for asyncio.create_task().
        def send(self, value: Any, /) -> Any: ...
        def throw(self, *error: Any) -> Any: ...
        def close(self) -> None: ...

else:
    Future = torch.futures.Future


def _settle(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():  # it is done if the task was cancelled
        waiter.set_result(None)


def _await(self: "torch._C.Future") -> Generator[Any, None, Any]:
    """Wait without blocking the running event loop; return the value or raise the error, as `wait()` does.

    Cancelling the task that waits cancels the call, as for the futures of asyncio.
    """
    if not self.done():
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()

        def wake(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed, so no task waits
                loop.call_soon_threadsafe(_settle, waiter)

        self.add_done_callback(wake)
        try:
            yield from waiter
        except asyncio.CancelledError:
            self.cancel()
            raise
    return self.wait()


# A task whose coroutine is a future -> the steps of its wait.
_waits: "weakref.WeakKeyDictionary[asyncio.Task[Any], Generator[Any, None, Any]]" = weakref.WeakKeyDictionary()


def _wait_of_task(future: "torch._C.Future") -> Generator[Any, None, Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("Only a task of asyncio sends to a future. Use `await future`, or `future.wait()`.")
    if task not in _waits:
        _waits[task] = _await(future)
    return _waits[task]


# These make a future a collections.abc.Coroutine, so that asyncio.create_task() and asyncio.run() take it. (The other
# functions of asyncio need `__await__` only.)
def _send(self: "torch._C.Future", value: Any) -> Any:
    return _wait_of_task(self).send(value)


def _throw(self: "torch._C.Future", *error: Any) -> Any:
    return _wait_of_task(self).throw(*error)


def _close(self: "torch._C.Future") -> None:
    """Do nothing: a task whose event loop has ended does not affect the call."""


def _wait_all(futures: "list[torch.futures.Future]") -> list[Any]:
    """Wait until all futures are complete; return their values, in order. Any thread may call it.

    Raises:
        Exception: the error of the first future that fails, without waiting for the others.
    """
    return _wait_for_futures(futures)


# Makes the callback of a future run in the context (contextvars) of the code that registers it. Set by torchrpc.observe
# while it traces.
in_context: Callable[[Any], Any] | None = None


def _seeing(method: Any) -> Any:
    """Wrap a method of futures so that its use marks the future as seen: the failure of a seen future is not logged."""

    @functools.wraps(method)
    def look(self: "torch._C.Future", *args: Any) -> Any:
        _mark_future_seen(self)
        if in_context is not None and args:
            args = (in_context(args[0]), *args[1:])
        result = method(self, *args)
        if method.__name__ == "then":
            _mark_future_dependent(result, self)
        return result

    look._marks_seen = True  # type: ignore[attr-defined]
    return look


_collect_all = torch.futures.collect_all


@functools.wraps(_collect_all)
def _seeing_collect_all(futures: "list[torch.futures.Future]") -> "torch.futures.Future[list[torch.futures.Future]]":
    futures = list(futures)
    collected = _collect_all(futures)
    for future in futures:
        _mark_future_seen(future)
        _mark_future_dependent(collected, future)
    return collected


def extend_futures() -> None:
    """Make `torch._C.Future`, the base of `torch.futures.Future`, a coroutine, unless torch has done so. Replace its
    waits by waits that Ctrl-C interrupts, and its repr by one that names the call. Add `cancel`. Record whether the
    program has looked at a future.
    """
    if not hasattr(torch._C.Future, "__await__"):
        torch._C.Future.__await__ = _await
        torch._C.Future.send, torch._C.Future.throw, torch._C.Future.close = _send, _throw, _close
    for name in ("then", "add_done_callback", "value"):
        method = getattr(torch._C.Future, name)
        if not hasattr(method, "_marks_seen"):
            setattr(torch._C.Future, name, _seeing(method))
    torch.futures.collect_all = _seeing_collect_all
    torch._C.Future.wait = _wait_for_future
    torch._C.Future.cancel = _cancel_future
    torch._C.Future.__repr__ = _repr_of_future
    torch.futures.wait_all = _wait_all
