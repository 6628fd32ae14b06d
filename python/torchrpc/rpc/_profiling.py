"""How profilers show calls."""

from collections.abc import Callable
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from torchrpc._C import _CallRange, _get_current_rpc_agent

from ._cpp_functions import CppFunction
from .internal import RPCExecMode, _build_rpc_profiling_key


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


def call_shown(
    mode: RPCExecMode, call: Callable[..., Any], to: Any, func: Any, args: Any, kwargs: Any, timeout: float
) -> Any:
    """Make a call by a function of the extension, so that the profiles that are being recorded show it."""
    shown = _range_of(mode, to, func)
    if shown is None:
        return call(to, func, args, kwargs, timeout)
    with shown:
        result = call(to, func, args, kwargs, timeout)
    if mode is RPCExecMode.REMOTE:
        result._set_profiling_future(shown.ended())
    return result
