"""Supervised objects: a handle whose object is created again on another worker when its worker is lost.

The worker that has called `supervise` is the supervisor: it notices the loss when one of its calls fails. Any thread
may use a handle.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchrpc._C import _get_current_rpc_agent

from .._errors import RpcError, WorkerLostError
from ..constants import UNSET_RPC_TIMEOUT
from ..rref_proxy import RRefProxy
from . import named_objects, sending
from .checks import _check_initialized, _to_worker_info, check_arguments
from .retries import _check_count

if TYPE_CHECKING:
    from ..api import RRef

_RESTARTS = ("on_failure", "never")


def supervise(
    factory: Callable[..., Any],
    to: Iterable[Any],
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    restart: str = "on_failure",
    max_restarts: int = 3,
    repeat_calls: bool = False,
    name: str | None = None,
) -> "SupervisedObject":
    """Create `factory(*args, **kwargs)` on the first of these workers, and again on the next when that worker is lost.

    This function does not wait until the object exists. The state of an object is lost with its worker: let the factory
    load it. Any thread may call this function, and use the handle that it returns.

    Args:
        factory (Callable): often a class; as the function of `rpc.remote`.
        to (list): names, ranks or infos of workers, used in this order; after the last one, the first one is used
            again. Workers that are not in the group at that moment are skipped.
        args (tuple), kwargs (dict): arguments of the factory; no RRefs of workers that may be lost.
        restart (str): `"on_failure"`, or `"never"`: the handle fails as soon as the worker is lost.
        max_restarts (int): how often the object may be created again, at most 1,000.
        repeat_calls (bool): repeat a call whose worker was lost on the new object; the method may then run twice.
            False: such a call raises WorkerLostError, and later calls reach the new object.
        name (str): register the object, and each object that replaces it, under this name (`torchrpc.register`).

    Raises:
        ValueError, TypeError: an argument of the wrong kind; the text names it. Or the name is taken.
        RpcError: none of the workers is in the group.
        ShutdownError: RPC is not initialized.

    Example:
        >>> replay = torchrpc.supervise(list, to=["worker1", "worker2"], args=([1, 2],))
        >>> replay.rpc_sync().count(2)
        1
        >>> replay.owner_name(), replay.restarts
        ('worker1', 0)
    """
    _check_initialized()
    if not callable(factory):
        raise TypeError("supervise: factory must be callable.")
    if isinstance(to, str) or not isinstance(to, Iterable) or not (workers := list(to)):
        raise TypeError("supervise: to must be a list of workers, of one at least.")
    if restart not in _RESTARTS:
        raise ValueError(f"supervise: restart must be one of {_RESTARTS}, but is {restart!r}.")
    _check_count("supervise: max_restarts", max_restarts)
    making = (factory, *check_arguments(args, kwargs))
    return SupervisedObject(workers, making, max_restarts if restart == "on_failure" else 0, repeat_calls, name)


class SupervisedObject:
    """The handle of a supervised object; `supervise` makes it.

    It cannot be sent to other workers: give the object a name. Any thread may call its methods.
    """

    __module__ = "torchrpc"

    def __init__(
        self,
        workers: list[Any],
        making: tuple[Callable[..., Any], tuple, dict[str, Any]],
        max_restarts: int,
        repeat_calls: bool,
        name: str | None,
    ) -> None:
        self._workers, self._making, self._repeat_calls, self._name = workers, making, repeat_calls, name
        self._max_restarts = max_restarts
        self._lock = threading.RLock()  # guards the members below
        self._restarts = 0
        self._next = 0  # index in `_workers`
        self._rref = self._make()

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: `handle.rpc_sync().method(...)` calls a method of the object and returns its result."""
        return _SupervisedProxy(self, self._call_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: `handle.rpc_async().method(...)` calls a method and returns the future of its result."""
        return _SupervisedProxy(self, self._call_async, timeout)

    def rref(self) -> "RRef[Any]":
        """Return an RRef to the present object. It is lost with its worker, and not replaced."""
        with self._lock:
            return self._rref

    def owner_name(self) -> str:
        """Return the name of the worker that has the present object."""
        return self.rref().owner_name()

    @property
    def restarts(self) -> int:
        """How often the object has been created again."""
        with self._lock:
            return self._restarts

    def __reduce__(self) -> Any:
        raise TypeError(
            "a supervised object cannot be sent to other workers: give it a name, and let them torchrpc.lookup(name)."
        )

    def _make(self) -> "RRef[Any]":
        """Create the object on the next worker that is in the group. Called with the lock held."""
        agent = _get_current_rpc_agent()
        present = {worker.name for worker in agent.get_worker_infos()}
        lost: RpcError | None = None
        for _ in self._workers:
            worker = self._workers[self._next]
            self._next = (self._next + 1) % len(self._workers)
            try:
                info = _to_worker_info(worker)
                if info.name not in present:
                    continue
                factory, args, kwargs = self._making
                rref = sending.remote(info, factory, args=args, kwargs=kwargs)
                if self._name is not None:
                    named_objects.register(self._name, rref)
                return rref
            except RpcError as exc:  # this one is lost, too
                lost = exc
        raise RpcError(f"supervise: none of the workers {self._workers} can be reached.") from lost

    def _replace(self, rref: "RRef[Any]", loss: RpcError) -> bool:
        """Create a new object after the loss of the worker of `rref`. Return whether there is a new object now."""
        with self._lock:
            if rref is not self._rref:
                return True  # another call has replaced it already
            if self._restarts >= self._max_restarts:
                return False
            self._restarts += 1
            try:
                self._rref = self._make()
            except RpcError as exc:
                raise exc from loss
            return True

    def _is_loss(self, rref: "RRef[Any]", exc: BaseException) -> bool:
        """Whether the call failed because the object's worker is lost, and not inside the method."""
        return isinstance(exc, WorkerLostError) and exc.worker == rref.owner_name()

    def _call_sync(self, timeout: float, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        while True:
            rref = self.rref()
            try:
                return getattr(RRefProxy(rref, sending.rpc_sync, timeout), name)(*args, **kwargs)
            except WorkerLostError as exc:
                if not self._is_loss(rref, exc) or not self._replace(rref, exc) or not self._repeat_calls:
                    raise

    def _call_async(self, timeout: float, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        result: torch.futures.Future = torch.futures.Future()
        self._start(result, timeout, name, args, kwargs)
        return result

    def _start(
        self, result: torch.futures.Future, timeout: float, name: str, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        rref = self.rref()

        def on_loss(exc: WorkerLostError) -> None:
            if self._is_loss(rref, exc) and self._replace(rref, exc) and self._repeat_calls:
                self._start(result, timeout, name, args, kwargs)
            else:
                result.set_exception(exc)

        def on_done(future: torch.futures.Future) -> None:
            try:
                try:
                    value = future.wait()
                except WorkerLostError as exc:
                    return on_loss(exc)
                result.set_result(value)
            except Exception as exc:
                result.set_exception(exc)

        try:
            future = getattr(RRefProxy(rref, sending.rpc_async, timeout), name)(*args, **kwargs)
        except WorkerLostError as exc:
            return on_loss(exc)
        future.add_done_callback(on_done)


class _SupervisedProxy:
    """Turns `proxy.method(*args, **kwargs)` into a call of a handle."""

    def __init__(self, handle: SupervisedObject, call: Callable[..., Any], timeout: float) -> None:
        self._handle, self._call, self._timeout = handle, call, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(self._timeout, name, args, kwargs)

        call.__qualname__ = f"SupervisedObject.{name}"
        return call
