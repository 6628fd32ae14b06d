"""Shows the calls that this worker makes, as ranges in profiles and as spans in traces."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from torchrpc._C import _CallRange, _calls_are_profiled, _get_current_rpc_agent

from ..internal import RPCExecMode, _build_rpc_profiling_key
from .cpp_functions import CppFunction


def _function_name(func: Callable) -> str:
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
    """Return the range of a call, or None if the call has no valid callee or function: the call raises the error."""
    try:
        agent = _get_current_rpc_agent()
        callee = getattr(to, "name", None) or agent.get_worker_info(to).name
        return _CallRange(_build_rpc_profiling_key(mode, _function_name(func), agent.get_worker_info().name, callee))
    except Exception:
        return None


# Makes a call inside a span: (mode, call, to, func, args, kwargs, timeout) -> its result. Set by torchrpc.observe.
call_in_span: Callable[..., Any] | None = None


def call_shown(
    mode: RPCExecMode, call: Callable[..., Any], to: Any, func: Any, args: Any, kwargs: Any, timeout: float
) -> Any:
    """Make a call with `call`, a function of the extension, so that profiles and traces show it."""
    in_span = call_in_span
    if in_span is not None:
        call = functools.partial(in_span, mode, call)
    if _calls_are_profiled():
        return call_with_range(mode, call, to, func, args, kwargs, timeout)
    return call(to, func, args, kwargs, timeout)


def call_with_range(
    mode: RPCExecMode, call: Callable[..., Any], to: Any, func: Any, args: Any, kwargs: Any, timeout: float
) -> Any:
    """Make a call with `call`, a function of the extension, inside a range for the active profiles of this thread."""
    call_range = _range_of(mode, to, func)
    if call_range is None:
        return call(to, func, args, kwargs, timeout)
    with call_range:
        result = call(to, func, args, kwargs, timeout)
    if mode is RPCExecMode.REMOTE:
        result._set_profiling_future(call_range.ended())
    return result
