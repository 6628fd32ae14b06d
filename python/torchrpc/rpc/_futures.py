"""Torch's futures: awaitable in any asyncio event loop (`await rpc.rpc_async(...)`), with waits that Ctrl-C ends.

A future completes on a thread of its own choosing; the loop is woken through call_soon_threadsafe.
"""

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any

import torch

from torchrpc._C import _wait_for_future, _wait_for_futures


def _settle(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():  # a cancelled task has gone away; the call itself goes on
        waiter.set_result(None)


def _await(self: "torch._C.Future") -> Generator[Any, None, Any]:
    """Wait without blocking the running loop; gives the value or raises the error, as `wait()` does."""
    if not self.done():
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()

        def wake(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, waiter)

        self.add_done_callback(wake)
        yield from waiter
    return self.wait()


def _wait_all(futures: "list[torch.futures.Future]") -> list[Any]:
    """Wait until all of the futures are complete; give their values, in order.

    Raises:
        Exception: the error of the first that fails, without waiting for the others.
    """
    return _wait_for_futures(futures)


def extend_futures() -> None:
    """Give `torch._C.Future` (and so `torch.futures.Future`) an `__await__`, unless torch has one, and our waits."""
    if not hasattr(torch._C.Future, "__await__"):
        torch._C.Future.__await__ = _await
    torch._C.Future.wait = _wait_for_future
    torch.futures.wait_all = _wait_all
