"""`batched`: one invocation of a function answers the calls of many callers.

Each function, or each object for a method, has a `_Queue`. The threads of the pool add calls to it and return futures.
The function runs in the queue's own thread, which ends after some seconds without calls.
"""

import functools
import inspect
import math
import numbers
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, overload

import torch

from torchrpc import _C

from ..functions import AsyncFunction, async_execution

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)

__all__ = ["batched"]

_IDLE_S = 5.0  # how long a queue's thread waits for another call before it ends


class _Call(NamedTuple):
    owner: tuple  # for a method, its object; else empty
    arguments: tuple
    future: "torch.futures.Future"
    arrived: float


class _Queue:
    """Pending calls, and the thread that answers them. Any thread may call `put`.

    Args:
        answer: takes a list of calls and completes their futures; never raises.
        timeout (float): seconds that a call waits until its batch is full.
    """

    def __init__(self, answer: Callable[[list[_Call]], None], timeout: float) -> None:
        self._answer = answer
        self._timeout = timeout
        # Guarded by _changed:
        self._changed = threading.Condition()
        self._calls: list[_Call] = []
        self._lent = _C._LentThread()  # of the worker that serves the last call: its functions may call while it ends
        self._batch_size = 1
        self._wake_size = 1  # the number of calls at which put() notifies the thread
        self._thread: threading.Thread | None = None

    def put(self, owner: tuple, arguments: tuple, batch_size: int) -> "torch.futures.Future":
        future: torch.futures.Future = torch.futures.Future()
        lent = _C._LentThread()
        with self._changed:
            self._lent = lent
            self._calls.append(_Call(owner, arguments, future, time.monotonic()))
            self._batch_size = batch_size
            if self._thread is None or not self._thread.is_alive():  # a forked child has no such thread
                self._thread = threading.Thread(target=self._run, name="torchrpc.batched", daemon=True)
                self._thread.start()
            elif len(self._calls) >= self._wake_size:
                self._changed.notify()
        return future

    def _run(self) -> None:
        while self._answer_batch():
            pass

    def _answer_batch(self) -> bool:
        """Answer one batch. Return False if no call has arrived for `_IDLE_S`; then the thread ends.

        This is a separate function so that the thread holds no call while it waits for the next ones.
        """
        batch, lent = self._take_batch()
        if batch:
            lent.run(functools.partial(self._answer, batch))
        return bool(batch)

    def _take_batch(self) -> tuple[list[_Call], _C._LentThread]:
        with self._changed:
            self._wake_size = 1
            if not self._changed.wait_for(lambda: self._calls, _IDLE_S):
                self._thread = None
                return [], self._lent
            self._wake_size = self._batch_size
            left = self._calls[0].arrived + self._timeout - time.monotonic()
            self._changed.wait_for(lambda: len(self._calls) >= self._batch_size, max(0.0, left))
            batch, self._calls = self._calls[: self._batch_size], self._calls[self._batch_size :]
            return batch, self._lent


def _collect(name: str, values: tuple, stack: bool) -> Any:
    """Return one parameter's values of all callers: a list, or a tensor with the callers as its first dimension."""
    if not stack or not all(isinstance(value, torch.Tensor) for value in values):
        return list(values)
    try:
        return torch.stack(values)
    except RuntimeError as error:
        raise ValueError(
            f"The callers' tensors for {name!r} cannot be stacked: {error}. Have them all send the same shape, or use "
            "batched(stack=False), which gives the function a list."
        ) from None


def _split_result(result: Any, n: int) -> Sequence[Any]:
    """Return the parts of the function's result for `n` callers."""
    if result is None:
        return [None] * n
    if isinstance(result, tuple):
        return list(zip(*(_split_result(part, n) for part in result), strict=True))
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
        arguments = [_collect(name, values, stack) for name, values in columns]
        results = _split_result(function(*calls[0].owner, *arguments), len(calls))
    except BaseException as error:  # also SystemExit: the callers must get an answer
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
                f"batched cannot take {function.__qualname__}{signature}: {parameter} does not name one argument of a "
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
                f"max_batch must be an int or return one, but is a {type(max_batch).__name__}: {max_batch!r}."
            )
        if int(max_batch) < 1:
            raise ValueError(f"max_batch must be at least 1, but is {max_batch}.")
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds, but is a {type(timeout).__name__}: {timeout!r}.")
    if not 0 <= float(timeout) < math.inf:
        raise ValueError(f"timeout must be from 0 to a finite number of seconds, but is {timeout}.")


class BatchedFunction(AsyncFunction[..., _T_co], Protocol[_T_co]):
    """The type of a function with `batched`, called with the arguments of one caller."""


class _Decorator(Protocol):
    @overload
    def __call__(self, function: Callable[..., list[_T]]) -> BatchedFunction[_T]: ...
    @overload
    def __call__(self, function: Callable[..., _T]) -> BatchedFunction[_T]: ...


@overload
def batched(function: Callable[..., list[_T]]) -> BatchedFunction[_T]: ...
@overload
def batched(function: Callable[..., _T]) -> BatchedFunction[_T]: ...
@overload
def batched(*, max_batch: int | Callable[..., int] = 32, timeout: float = 0.01, stack: bool = True) -> _Decorator: ...
def batched(
    function: Callable[..., Any] | None = None,
    *,
    max_batch: int | Callable[..., int] = 32,
    timeout: float = 0.01,
    stack: bool = True,
) -> Any:
    """Decorator: one invocation of the function answers the calls of many callers.

    Each caller calls the function by RPC with its own arguments and gets its own result. The function itself receives,
    for each parameter, the values of all callers of a batch, in the same order, and returns a result for each caller.
    It runs when `max_batch` calls have arrived or the first of them has waited for `timeout` seconds, whichever comes
    first. So an absent caller delays the others by at most `timeout`.

    Args:
        function: a function of a module or a class. In a class the first parameter must be called `self`; calls on
            different objects form different batches. `*args`, `**kwargs` and keyword-only parameters are not
            allowed; defaults are.
        max_batch (int): the largest number of callers of one invocation, at least 1. Or a function that returns the
            number. It is called for each call: for a method with the object, otherwise without arguments.
        timeout (float): seconds that a call waits for others. 0: no waiting; the calls that arrived during the last
            invocation form a batch.
        stack (bool): if all callers pass a tensor, stack these into one tensor with the callers as a new first
            dimension. False: always pass lists.

    The function returns a tensor with the callers as first dimension, a list with one result per caller (an exception
    in it is raised at that caller), a tuple of these (each caller gets a tuple), or None. An exception of the function
    is raised at all callers of the batch. The function runs in a thread of its own, one invocation at a time, so data
    that only it uses needs no lock. That thread has no context of distributed autograd: gradients do not flow through
    such calls. Use `torch.no_grad()` in the function unless it computes gradients of its own.

    A direct call in the function's own process returns a `torch.futures.Future`; any thread may make it. The function
    is an `rpc.functions.async_execution` function: no thread waits for the answer, and `rpc_sync`, `rpc_async`,
    `remote` and the proxies of an RRef can call it. It does not use torchrpc's core and works with torch's own RPC.

    Raises:
        TypeError, ValueError: when decorating: `max_batch` or `timeout` out of range, a function without named
            parameters. At one caller: arguments that do not fit the function. At all callers of a batch: tensors that
            cannot be stacked, or a result that does not have one part per caller.

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
    batch_size = max_batch if callable(max_batch) else lambda *_: max_batch
    answer = functools.partial(_answer, function, names[owners:], stack)
    queues: dict[int | None, _Queue] = {}  # by the id of the object; None for a function
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
        return queue_of(owner).put(owner, arguments, max(1, batch_size(*owner)))

    return call
