"""`wait`: block until some of many futures are done.

Any thread may wait, and a future completes on any thread. Each future gets at most one callback, which keeps a set of
the present waiters, so repeated waits for a slow future cost no memory.
"""

import math
import numbers
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from torchrpc._C import _mark_future_seen

from .checks import check_seconds

__all__ = ["wait"]


class _Waiter:
    """One invocation of `wait`. `reached` is set when `count` futures have completed."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._remaining = count
        self.reached = threading.Event()

    def decrement(self) -> None:
        with self._lock:
            self._remaining -= 1
            reached = self._remaining == 0
        if reached:
            self.reached.set()


class _Completion:
    """The callback of one future: notifies the threads that wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._waiters: set[_Waiter] = set()

    def add(self, waiter: _Waiter) -> None:
        with self._lock:
            if not self._done:
                self._waiters.add(waiter)
                return
        waiter.decrement()

    def remove(self, waiter: _Waiter) -> None:
        with self._lock:
            self._waiters.discard(waiter)

    def complete(self, _: Any) -> None:
        with self._lock:
            self._done = True
            waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            waiter.decrement()


_completions: "weakref.WeakKeyDictionary[Any, _Completion]" = weakref.WeakKeyDictionary()
_completions_lock = threading.Lock()


def _completion_of(future: Any) -> _Completion:
    with _completions_lock:
        completion = _completions.get(future)
        is_new = completion is None
        if completion is None:
            completion = _completions[future] = _Completion()
    if is_new:
        future.add_done_callback(completion.complete)  # runs it now if the future is done
    return completion


def _check(futures: list[Any], num_returns: Any, timeout: Any) -> None:
    for future in futures:
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"wait() takes futures, as rpc_async returns them, but got a {type(future).__name__}. For an RRef "
                "write rref.rpc_async() and a method, or rpc_async with a function that takes it."
            )
    if len({id(future) for future in futures}) < len(futures):
        raise ValueError("wait() got the same future twice; pass each one once.")
    if not isinstance(num_returns, numbers.Integral):
        raise TypeError(f"num_returns must be an int, but is a {type(num_returns).__name__}: {num_returns!r}.")
    if futures and not 1 <= int(num_returns) <= len(futures):
        raise ValueError(f"num_returns must be from 1 to the number of futures, {len(futures)}, but is {num_returns}.")
    if timeout is not None:
        check_seconds(timeout, "0: only check; None: no limit.")


def wait(
    futures: Iterable[Any], num_returns: int = 1, timeout: float | None = None
) -> tuple[list["torch.futures.Future"], list["torch.futures.Future"]]:
    """Wait until `num_returns` of the futures are done; return the done ones and the others.

    Args:
        futures: any `torch.futures.Future`s, from `rpc_async` for example; each at most once.
        num_returns (int): the number of futures to wait for, from 1 to all of them.
        timeout (float): seconds; None: no limit; 0: only check.

    Returns:
        (ready, rest): two lists that together have all the futures, each in the order of `futures`. `ready` has
        `num_returns` futures, or fewer after the timeout. If more are done, `ready` has the first ones. A future whose
        call failed is done; its `wait()` raises the error.

    Raises:
        TypeError: `futures` contains something else than futures; `num_returns` or `timeout` has another type.
        ValueError: a future occurs twice; `num_returns` or `timeout` is out of range.

    Any thread may call it, also with futures that other threads wait for. The timeout does not end the calls. Without
    futures the result is ([], []). The meaning is that of Ray's `ray.wait`. To treat workers fairly, append new futures
    at the end.

    Example:
        >>> pending = {rpc.rpc_async(worker, len, args=(worker,)): worker for worker in ("worker1", "worker2")}
        >>> while pending:
        ...     (done,), _ = torchrpc.wait(pending)
        ...     print(pending.pop(done), done.wait())
    """
    futures = list(futures)
    _check(futures, num_returns, timeout)
    for future in futures:
        _mark_future_seen(future)  # futures that are done already get no callback, which would mark them
    ready = [future for future in futures if future.done()]
    if len(ready) < min(num_returns, len(futures)) and timeout != 0:
        _wait_for_futures(futures, ready, num_returns, timeout)
        ready = [future for future in futures if future.done()]
    ready = ready[:num_returns]
    ready_ids = {id(future) for future in ready}
    return ready, [future for future in futures if id(future) not in ready_ids]


def _wait_for_futures(futures: list[Any], ready: list[Any], num_returns: int, timeout: float | None) -> None:
    waiter = _Waiter(num_returns - len(ready))
    done = {id(future) for future in ready}
    completions = [_completion_of(future) for future in futures if id(future) not in done]
    try:
        for completion in completions:
            completion.add(waiter)
        waiter.reached.wait(None if timeout is None or math.isinf(timeout) else min(timeout, threading.TIMEOUT_MAX))
    finally:
        for completion in completions:
            completion.remove(waiter)
