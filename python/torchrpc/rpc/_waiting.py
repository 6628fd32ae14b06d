"""`wait`: block until some of many futures are done.

Callers wait in threads of their own; futures complete in any thread. One callback stands on each future that somebody
has ever waited for, and knows who waits now: waiting again and again for a slow one costs no memory.
"""

import math
import numbers
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["wait"]


class _Waiter:
    """One call of `wait`: how many futures must still complete."""

    def __init__(self, missing: int) -> None:
        self._lock = threading.Lock()
        self._missing = missing
        self.enough = threading.Event()

    def count(self) -> None:
        with self._lock:
            self._missing -= 1
            enough = self._missing == 0
        if enough:
            self.enough.set()


class _Completion:
    """What is to happen when one future completes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._waiters: set[_Waiter] = set()

    def tell(self, waiter: _Waiter) -> None:
        with self._lock:
            if not self._done:
                self._waiters.add(waiter)
                return
        waiter.count()

    def forget(self, waiter: _Waiter) -> None:
        with self._lock:
            self._waiters.discard(waiter)

    def happen(self, _: Any) -> None:
        with self._lock:
            self._done = True
            waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            waiter.count()


_completions: "weakref.WeakKeyDictionary[Any, _Completion]" = weakref.WeakKeyDictionary()
_completions_lock = threading.Lock()


def _completion_of(future: Any) -> _Completion:
    with _completions_lock:
        completion = _completions.get(future)
        is_new = completion is None
        if completion is None:
            completion = _completions[future] = _Completion()
    if is_new:
        future.add_done_callback(completion.happen)  # at once, in this thread, if it is done already
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
    if not isinstance(timeout, numbers.Real | None):
        raise TypeError(f"timeout must be a number of seconds or None, but is a {type(timeout).__name__}: {timeout!r}.")
    if timeout is not None and not float(timeout) >= 0:
        raise ValueError(f"timeout must not be negative, but is {timeout}. 0: only look; None: no limit.")


def wait(
    futures: Iterable[Any], num_returns: int = 1, timeout: float | None = None
) -> tuple[list["torch.futures.Future"], list["torch.futures.Future"]]:
    """Wait until `num_returns` of the futures are done; say which those are and which are left.

    Args:
        futures: futures of `rpc_async`, their `then`, or of one's own; each at most once.
        num_returns (int): how many to wait for, from 1 to all of them.
        timeout (float): seconds; None: no limit; 0: only look.

    Returns:
        (ready, rest): two lists that have all the futures together, each in the order of `futures`. `ready` has
        `num_returns` of them, never more: if more are done, those that stand first. It has fewer when the time is up.
        A future whose call failed is done, too: its `wait()` raises the error.

    Raises:
        TypeError, ValueError: no future, a future twice, `num_returns` or `timeout` out of range.

    Any thread may call, also with futures that others wait for. A time limit leaves the calls alone: they go on. Of no
    futures, none are ready: ([], []). The meaning is that of Ray's `ray.wait`. To be fair to workers that are served
    one by one, append new futures at the end.

    Example:
        >>> pending = {rpc.rpc_async(worker, len, args=(worker,)): worker for worker in ("worker1", "worker2")}
        >>> while pending:
        ...     (done,), _ = torchrpc.wait(pending)
        ...     print(pending.pop(done), done.wait())
    """
    futures = list(futures)
    _check(futures, num_returns, timeout)
    ready = [future for future in futures if future.done()]
    if len(ready) < min(num_returns, len(futures)) and timeout != 0:
        _block(futures, ready, num_returns, timeout)
        ready = [future for future in futures if future.done()]
    ready = ready[:num_returns]
    taken = {id(future) for future in ready}
    return ready, [future for future in futures if id(future) not in taken]


def _block(futures: list[Any], ready: list[Any], num_returns: int, timeout: float | None) -> None:
    waiter = _Waiter(num_returns - len(ready))
    done = {id(future) for future in ready}
    completions = [_completion_of(future) for future in futures if id(future) not in done]
    try:
        for completion in completions:
            completion.tell(waiter)
        waiter.enough.wait(None if timeout is None or math.isinf(timeout) else min(timeout, threading.TIMEOUT_MAX))
    finally:
        for completion in completions:
            completion.forget(waiter)
