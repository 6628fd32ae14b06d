"""`batched`: the calls of many callers, answered by one invocation of a function.

A batch gathers in a `_Queue`, of which there is one for each function, and for a method one for each object. Calls come
on the threads that serve RPC, put their arguments there and leave with a future. The function runs in the queue's own
thread, which lives while there are calls.
"""

import functools
import inspect
import math
import numbers
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .functions import async_execution

__all__ = ["batched"]

# Seconds that a queue's thread waits for another call before it ends.
_IDLE = 5.0


class _Call(NamedTuple):
    owner: tuple  # the object, for a method, else nothing
    arguments: tuple
    future: "torch.futures.Future"
    arrived: float


class _Queue:
    """Calls that wait, and the thread that answers them. Any thread calls `put`.

    Args:
        answer: takes a list of calls and completes their futures; never raises.
        timeout (float): seconds that a call waits for others.
    """

    def __init__(self, answer: Callable[[list[_Call]], None], timeout: float) -> None:
        self._answer = answer
        self._timeout = timeout
        # Guarded by _changed:
        self._changed = threading.Condition()
        self._calls: list[_Call] = []
        self._size = 1  # of a full batch
        self._enough = 1  # calls that are worth waking the thread for
        self._thread: threading.Thread | None = None

    def put(self, owner: tuple, arguments: tuple, size: int) -> "torch.futures.Future":
        future: torch.futures.Future = torch.futures.Future()
        with self._changed:
            self._calls.append(_Call(owner, arguments, future, time.monotonic()))
            self._size = size
            if self._thread is None or not self._thread.is_alive():  # a fork leaves it behind
                self._thread = threading.Thread(target=self._run, name="torchrpc.batched", daemon=True)
                self._thread.start()
            elif len(self._calls) >= self._enough:
                self._changed.notify()
        return future

    def _run(self) -> None:
        while self._serve():
            pass

    def _serve(self) -> bool:
        """Answers one batch. False: no call has come for a while, and the thread has ended."""
        batch = self._take()
        if batch:
            self._answer(batch)
        return bool(batch)

    def _take(self) -> list[_Call]:
        with self._changed:
            self._enough = 1
            if not self._changed.wait_for(lambda: self._calls, _IDLE):
                self._thread = None
                return []
            self._enough = self._size
            left = self._calls[0].arrived + self._timeout - time.monotonic()
            self._changed.wait_for(lambda: len(self._calls) >= self._size, max(0.0, left))
            batch, self._calls = self._calls[: self._size], self._calls[self._size :]
            return batch


def _gather(name: str, values: tuple, stack: bool) -> Any:
    """One argument of all callers: a list, or a tensor with the callers in its first dimension."""
    if not stack or not all(isinstance(value, torch.Tensor) for value in values):
        return list(values)
    try:
        return torch.stack(values)
    except RuntimeError as error:
        raise ValueError(
            f"The callers' tensors for {name!r} cannot be stacked: {error}. Have them all send the same shape, or use "
            "batched(stack=False), which gives the function a list."
        ) from None


def _hand_out(result: Any, n: int) -> Sequence[Any]:
    """What each of `n` callers gets of what the function returned."""
    if result is None:
        return [None] * n
    if isinstance(result, tuple):
        return list(zip(*(_hand_out(part, n) for part in result), strict=True))
    if isinstance(result, torch.Tensor) and result.dim() > 0 and len(result) == n:
        return result.unbind()
    if isinstance(result, list) and len(result) == n:
        return result
    kind = (
        f"a tensor of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else f"a {type(result).__name__}"
    )
    length = f" of length {len(result)}" if isinstance(result, list) else ""
    raise TypeError(
        f"A batched function called for {n} callers returned {kind}{length}. It must return a tensor whose first "
        f"dimension is {n}, a list of {n} results, a tuple of such tensors and lists, or None."
    )


def _answer(function: Callable, names: list[str], stack: bool, calls: list[_Call]) -> None:
    try:
        columns = zip(names, zip(*(call.arguments for call in calls), strict=True), strict=True)
        arguments = [_gather(name, values, stack) for name, values in columns]
        results = _hand_out(function(*calls[0].owner, *arguments), len(calls))
    except BaseException as error:  # SystemExit, too: callers must get an answer
        failure = error if isinstance(error, Exception) else RuntimeError(f"The batched function raised {error!r}.")
        results = [failure] * len(calls)
    for call, result in zip(calls, results, strict=True):
        if isinstance(result, Exception):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)


def _parameters(function: Callable) -> tuple[inspect.Signature, list[str]]:
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"batched cannot take {function.__qualname__}{signature}: {parameter} has no place of its own in a "
                "call. Name each parameter, without * and **."
            )
    names = list(signature.parameters)
    if not names or names == ["self"]:
        raise TypeError(f"batched cannot take {function.__qualname__}{signature}: there is nothing to gather.")
    return signature, names


def _check(max_batch: Any, timeout: Any) -> None:
    if not callable(max_batch):
        if not isinstance(max_batch, numbers.Integral):
            raise TypeError(
                f"max_batch must be an int or give one, but is a {type(max_batch).__name__}: {max_batch!r}."
            )
        if int(max_batch) < 1:
            raise ValueError(f"max_batch must be at least 1, but is {max_batch}.")
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds, but is a {type(timeout).__name__}: {timeout!r}.")
    if not 0 <= float(timeout) < math.inf:
        raise ValueError(f"timeout must be from 0 to a finite number of seconds, but is {timeout}.")


def batched(
    function: Callable | None = None,
    *,
    max_batch: int | Callable[..., int] = 32,
    timeout: float = 0.01,
    stack: bool = True,
) -> Any:
    """Decorator: one invocation of the function answers the calls of many callers.

    A caller calls it by RPC with arguments of its own, and gets a result of its own, as of any function. The function
    is written for many: it gets, for each parameter, the values of all callers of a batch, in the same order, and
    returns a result for each. It is called when `max_batch` calls have come or when the first of them has waited for
    `timeout` seconds, whichever is sooner: a caller that stays away delays the others, but cannot stall them.

    Args:
        function: of a module or a class. In a class the first parameter must be called `self`; calls on different
            objects are batched apart. Parameters are named, without `*`; defaults work.
        max_batch (int): callers of one invocation at most, at least 1. Or a function that gives the number, called with
            each call: with the object for a method, without arguments otherwise.
        timeout (float): seconds that a call waits for others. 0: none; what has come while the last invocation ran is
            a batch.
        stack (bool): where all callers give a tensor, have the function get one tensor, with the callers in a new first
            dimension. False: always lists.

    The function returns a tensor whose first dimension are the callers, a list with one result each (an exception in it
    is raised at that caller), a tuple of these (each caller gets a tuple), or None. What it raises is raised at all
    callers of the batch. It runs in a thread of its own, one invocation at a time, so that what only it uses needs no
    lock. That thread has no context of distributed autograd: gradients do not flow through such calls. Put
    `torch.no_grad()` into it unless it computes gradients of its own.

    Called in its own process, as a plain function, it returns a `torch.futures.Future`. It is an
    `rpc.functions.async_execution` function: no thread waits for the answer, and `rpc_sync`, `rpc_async`, `remote` and
    the proxies of an RRef can call it. It needs nothing of torchrpc's core, and works with torch's own RPC as well.

    Raises:
        TypeError, ValueError: when decorating: `max_batch` or `timeout` out of range, a function without named
            parameters. At one caller: arguments that do not fit the function. At all callers of a batch: tensors that
            cannot be stacked, a result that is not one for each.

    Example:
        >>> @torchrpc.batched(max_batch=8, timeout=0.005)
        ... def infer(images):  # (n, 1, 28, 28): n callers' images
        ...     with torch.no_grad():
        ...         return images.flatten(1) @ torch.ones(784, 10)  # in place of a model
        >>> rpc.rpc_sync("worker1", infer, args=(torch.rand(1, 28, 28),)).shape
        torch.Size([10])
    """
    if function is None:
        return functools.partial(batched, max_batch=max_batch, timeout=timeout, stack=stack)
    _check(max_batch, timeout)
    signature, names = _parameters(function)
    owners = 1 if names[0] == "self" else 0
    size = max_batch if callable(max_batch) else lambda *_: max_batch
    answer = functools.partial(_answer, function, names[owners:], stack)
    queues: dict[int | None, _Queue] = {}  # by the object's id; None where there is none
    lock = threading.Lock()

    def queue_of(owner: tuple) -> _Queue:
        key = id(owner[0]) if owner else None
        with lock:
            if key not in queues:
                queues[key] = _Queue(answer, timeout)
                if owner:
                    weakref.finalize(owner[0], queues.pop, key).atexit = False
            return queues[key]

    @async_execution
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> "torch.futures.Future":
        if kwargs or len(args) != len(names):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        owner, arguments = args[:owners], args[owners:]
        return queue_of(owner).put(owner, arguments, max(1, size(*owner)))

    return call
