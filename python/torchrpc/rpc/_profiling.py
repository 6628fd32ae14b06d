"""How profilers show calls: the decorator of rpc_sync, rpc_async and remote."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.jit._builtins import _find_builtin

from torchrpc._C import _CallRange, _calls_are_shown, _get_current_rpc_agent

from ._native import CppFunction
from .constants import UNSET_RPC_TIMEOUT
from .internal import RPCExecMode, _build_rpc_profiling_key

_F = TypeVar("_F", bound=Callable[..., Any])


def _name_of(func: Callable) -> str:
    operator = _find_builtin(func)
    if operator is not None:
        return operator
    if isinstance(func, CppFunction):
        return func.name
    func = getattr(func, "_wrapped_async_rpc_function", func)
    if isinstance(func, torch.jit.ScriptFunction):
        return torch._jit_internal._qualified_name(func)
    return getattr(func, "__qualname__", type(func).__qualname__)


def _range_of(mode: RPCExecMode, to: Any, func: Callable) -> _CallRange | None:
    """None if the call cannot be made: making it will say why."""
    try:
        agent = _get_current_rpc_agent()
        callee = getattr(to, "name", None) or agent.get_worker_info(to).name
        return _CallRange(_build_rpc_profiling_key(mode, _name_of(func), agent.get_worker_info().name, callee))
    except Exception:
        return None


def shown_in_profiles(mode: RPCExecMode) -> Callable[[_F], _F]:
    """Decorate a way of calling: profiles that are being recorded show what goes through it."""

    def decorate(call: _F) -> _F:
        @functools.wraps(call)
        def wrapper(
            to: Any, func: Callable, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
        ) -> Any:
            if not _calls_are_shown():  # as it is nearly always: the cheapest way on
                return call(to, func, args, kwargs, timeout)
            shown = _range_of(mode, to, func)
            if shown is None:
                return call(to, func, args, kwargs, timeout)
            with shown:
                result = call(to, func, args, kwargs, timeout)
            if mode is RPCExecMode.REMOTE:
                result._set_profiling_future(shown.ended())
            return result

        return wrapper  # type: ignore[return-value]

    return decorate
