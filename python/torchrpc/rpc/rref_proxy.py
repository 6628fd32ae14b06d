"""The proxies that `rref.rpc_sync()`, `rref.rpc_async()` and `rref.remote()` return, to call the value's methods."""

from collections.abc import Callable
from typing import Any

from torchrpc._C import PyRRef, _name_served_method

from . import api
from ._absent import CALL, Absent
from ._security.allow_list import check_method, local_value
from .constants import UNSET_RPC_TIMEOUT
from .internal import _AsyncResult

_invoke_rpc: Any = Absent("_invoke_rpc", CALL)
_local_invoke: Any = Absent("_local_invoke", "rref.rpc_sync(), rpc_async() and remote() call methods")
_local_invoke_async_execution = _local_invoke


def _call_method(rref: PyRRef, name: str, args: tuple, kwargs: dict) -> Any:
    """Call a method on the owner: only the owner knows whether the method is an `async_execution` function."""
    value = local_value(rref)
    _name_served_method(type(value), name)
    check_method(value, name)
    method = getattr(value, name)
    if not callable(method):
        raise TypeError(
            f"{type(value).__name__}.{name} is not a method: a proxy of an RRef calls methods only. Read it by a "
            f"function that runs on the owner, such as lambda rref: rref.local_value().{name}."
        )
    result = method(*args, **kwargs)
    return _AsyncResult(result) if hasattr(method, "_wrapped_async_rpc_function") else result


class RRefProxy:
    """Turns `proxy.method(*args, **kwargs)` into a call to the RRef's owner. Made by PyRRef; any thread may use it.

    Args:
        rref: refers to the object whose methods are called.
        rpc_api: `rpc_sync`, `rpc_async` or `remote`.
        timeout (float): seconds for each call; default: the group's time-out.
    """

    def __init__(self, rref: PyRRef, rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        rref, rpc_api, timeout = self.rref, self.rpc_api, self.rpc_timeout

        def call(*args: Any, **kwargs: Any) -> Any:
            if rpc_api is api.remote:
                # remote() could not report a missing method at once, so ask the owner for the type first.
                getattr(rref._get_type(timeout=timeout), name)
            return rpc_api(rref.owner(), _call_method, args=(rref, name, args, kwargs), timeout=timeout)

        call.__qualname__ = f"RRefProxy.{name}"
        return call
