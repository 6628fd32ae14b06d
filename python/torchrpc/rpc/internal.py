"""The functions and types that the extension looks up, and upstream's helpers for calls and profiles."""

import collections
import enum
import sys
from typing import Any

import torch

from ._absent import Absent
from ._calls.checks import check_call as check_call
from ._calls.coroutines import run_coroutine as run_coroutine
from ._calls.cpp_functions import CppFunction as CppFunction
from ._calls.cpp_functions import refuse_keywords as refuse_keywords
from ._errors import ArgumentMismatchError as ArgumentMismatchError
from ._errors import CancelledError as CancelledError
from ._errors import NameNotFoundError as NameNotFoundError
from ._errors import NotAllowedError as NotAllowedError
from ._errors import QuotaExceededError as QuotaExceededError
from ._errors import RendezvousError as RendezvousError
from ._errors import RpcError as RpcError
from ._errors import RpcTimeoutError as RpcTimeoutError
from ._errors import SerializationError as SerializationError
from ._errors import ShutdownError as ShutdownError
from ._errors import WorkerLostError as WorkerLostError
from ._group.accelerator import count_accelerators as count_accelerators
from ._logging import log_record as log_record
from ._security.allow_list import find_allowed as find_allowed
from ._values.by_value import is_main_by_value as is_main_by_value
from ._values.exceptions import _describe_exception, make_exception
from ._values.exceptions import _rebuild_exception as _rebuild_exception
from ._values.failure_log import log_failed_callback as log_failed_callback
from ._values.names import find_global as find_global
from ._values.names import find_script_function as find_script_function
from ._values.names import public_module as public_module
from ._values.pickler import _internal_rpc_pickler as _internal_rpc_pickler
from ._values.pickler import _InternalRPCPickler as _InternalRPCPickler
from ._values.pickler import deserialize, serialize
from ._values.pickler import raise_unsendable as raise_unsendable
from ._values.pickler import refuse_rrefs as refuse_rrefs
from ._values.plain_objects import lower_object as lower_object
from ._values.plain_objects import make_object as make_object
from ._values.plain_objects import refuse_function as refuse_function
from ._values.plain_objects import refuse_to_send as refuse_to_send
from ._values.structs import make_struct as make_struct
from ._values.structs import struct_fields as struct_fields

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

PythonUDF = collections.namedtuple("PythonUDF", ["func", "args", "kwargs"])
RemoteException = collections.namedtuple("RemoteException", ["msg", "exception_type"])


# The functions of Python that look at the frame of their caller, as eval() does for the names that it finds.
_LOOK_AT_CALLER = frozenset((dir, eval, exec, globals, locals, vars, sys._getframe))


def _call_in_frame(function: Any, args: tuple, kwargs: dict) -> Any:
    """Call a function that looks at the frame of its caller: the extension has none."""
    return function(*args, **kwargs)


class RPCExecMode(enum.Enum):
    """How a function is called; the value is part of the names that profilers show."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


_thread_local_tensor_tables: Any = Absent(
    "_thread_local_tensor_tables",
    "_internal_rpc_pickler.serialize(obj) returns bytes and tensors, and its deserialize(bytes, tensors) reads them",
)


class _AsyncResult:
    """Returned by a function whose result is the value of the future, not the future itself."""

    __slots__ = ("future",)

    def __init__(self, future: torch.futures.Future) -> None:
        self.future = future


def _run_function(python_udf: PythonUDF) -> Any:
    """Call `python_udf.func` and return its result, or a RemoteException if it raises."""
    try:
        if isinstance(python_udf, Exception):
            raise python_udf
        return python_udf.func(*python_udf.args, **(python_udf.kwargs or {}))
    except Exception as exc:
        return RemoteException(_describe_exception(exc)[0], type(exc))


def _handle_exception(result: Any) -> None:
    """Raise the exception that `result` describes, if it is a RemoteException."""
    if isinstance(result, RemoteException):
        raise make_exception(result.exception_type, result.msg)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Return the name under which a profiler shows a call."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def _start_record_function(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dest_worker_name: str
) -> Any:
    """Begin a profiler event for a call and return its record; the caller of this function ends it.

    Raises:
        AssertionError: the autograd profiler is not enabled.
    """
    assert torch.autograd._profiler_enabled(), "Autograd profiler should be enabled."
    record = torch.autograd._RecordFunction()
    key = _build_rpc_profiling_key(exec_type, str(func_name), current_worker_name, dest_worker_name)
    torch.autograd._run_before_callbacks(record, key)
    return record
