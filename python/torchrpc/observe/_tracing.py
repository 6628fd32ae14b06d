"""Spans of calls for OpenTelemetry, whose packages are loaded on use.

The caller's span is current while it makes the call, and its W3C trace context travels in a header of the call. The
callee's span is a child of the caller's span. It is current while the function runs, so that calls which the function
makes are its children. Any thread may make spans; each thread or coroutine has its own current span (contextvars).
"""

import contextvars
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import torch

import torchrpc.autograd as dist_autograd
from torchrpc import _C
from torchrpc.rpc._calls import futures, profiling
from torchrpc.rpc.internal import RPCExecMode, _AsyncResult

_lock = threading.Lock()
_current: "_Tracing | None" = None


def _load() -> tuple[Any, Any]:
    try:
        import opentelemetry.trace as api
        import opentelemetry.trace.propagation.tracecontext as tracecontext
    except ImportError as exc:
        raise ModuleNotFoundError("Traces need the package opentelemetry-api: pip install 'torchrpc[otel]'.") from exc
    return api, tracecontext.TraceContextTextMapPropagator()


def _me() -> str:
    return _C._get_current_rpc_agent().get_worker_info().name


def _in_context(callback: Any) -> Any:
    """Return the callback, bound to the current context (contextvars) and so to the current span."""
    if not callable(callback):
        return callback  # the future raises the error for it
    return functools.partial(contextvars.copy_context().run, callback)


class _Tracing:
    """Makes the spans, with one tracer provider."""

    def __init__(self, provider: Any) -> None:
        self.api, self.propagator = _load()
        self.tracer_provider = provider or self.api.get_tracer_provider()
        self.tracer = self.api.get_tracer("torchrpc", tracer_provider=self.tracer_provider)

    def _attributes(self, method: str, peer: str, **more: Any) -> dict[str, Any]:
        return {"rpc.system": "torchrpc", "rpc.method": method, "torchrpc.peer": peer, "torchrpc.worker": _me(), **more}

    def _fail(self, span: Any, text: str) -> None:
        span.set_status(self.api.Status(self.api.StatusCode.ERROR, text))

    # --- the caller ---

    def call(
        self, mode: RPCExecMode, call: Callable[..., Any], to: Any, func: Any, args: Any, kwargs: Any, timeout: float
    ) -> Any:
        """Make a call inside a span that ends with the call."""
        try:
            peer = getattr(to, "name", None) or _C._get_current_rpc_agent().get_worker_info(to).name
            name = _name_of(func)
        except Exception:
            return call(to, func, args, kwargs, timeout)  # which raises the error
        attributes = self._attributes(name, peer, **{"torchrpc.mode": mode.value})
        span = self.tracer.start_span(name, kind=self.api.SpanKind.CLIENT, attributes=attributes)
        is_sync = mode is RPCExecMode.SYNC
        with self.api.use_span(span, end_on_exit=is_sync, record_exception=True, set_status_on_exception=True):
            carrier: dict[str, str] = {}
            self.propagator.inject(carrier)
            _C._set_next_trace_context(carrier.get("traceparent", ""), carrier.get("tracestate", ""))
            try:
                result = call(to, func, args, kwargs, timeout)
            except BaseException:
                if not is_sync:
                    span.end()
                raise
            finally:
                _C._set_next_trace_context("", "")
        if not is_sync:
            self._end_with(span, result if mode is RPCExecMode.ASYNC else result._get_future())
        return result

    def _end_with(self, span: Any, future: Any) -> None:
        def end(error: str) -> None:
            if error:
                self._fail(span, " ".join(error.splitlines()[:2]))  # without the traceback
            span.end()

        _C._when_call_ends(future, end)

    # --- the callee ---

    def serve(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parent: str,
        state: str,
        peer: str,
        name: str,
    ) -> Any:
        """Run the function of a call inside a span that ends with its result."""
        carrier = {"traceparent": parent, "tracestate": state} if parent else {}
        span = self.tracer.start_span(
            name or _name_of(function),
            context=self.propagator.extract(carrier),
            kind=self.api.SpanKind.SERVER,
            attributes=self._attributes(name, peer),
        )
        is_over = True
        try:
            with self.api.use_span(span, record_exception=True, set_status_on_exception=True):
                result = function(*args, **kwargs)
            if isinstance(result, Coroutine):
                is_over = False
                return self._await_in_span(span, result)
            future = result.future if isinstance(result, _AsyncResult) else result
            if isinstance(future, torch.futures.Future | torch._C.Future):
                is_over = False
                self._end_with(span, future)
            return result
        finally:
            if is_over:
                span.end()

    async def _await_in_span(self, span: Any, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with self.api.use_span(span, end_on_exit=True, record_exception=True, set_status_on_exception=True):
            return await coroutine

    def record(self, name: str, peer: str, parent: str, state: str, begin_ns: int, end_ns: int, error: str) -> None:
        """Make the span of a call that ran without Python and has ended already."""
        carrier = {"traceparent": parent, "tracestate": state} if parent else {}
        span = self.tracer.start_span(
            name,
            context=self.propagator.extract(carrier),
            kind=self.api.SpanKind.SERVER,
            attributes=self._attributes(name, peer),
            start_time=begin_ns,
        )
        if error:
            self._fail(span, " ".join(error.splitlines()[:2]))
        span.end(end_ns)

    # --- backward passes ---

    def backward(self, run: Callable[..., None], context_id: int, *rest: Any) -> None:
        """Run a backward pass inside a span, on the worker that starts it."""
        attributes = {"torchrpc.context": context_id}
        with self.tracer.start_as_current_span("torchrpc.backward", attributes=attributes):
            run(context_id, *rest)


def _name_of(func: Any) -> str:
    name = profiling._function_name(func)
    if "::" in name:
        return name
    func = getattr(func, "_wrapped_async_rpc_function", func)
    module = getattr(func, "__module__", None) if hasattr(func, "__qualname__") else None
    return f"{module}.{name}" if module else name


def trace(tracer_provider: Any = None) -> Callable[[], None]:
    """Make OpenTelemetry spans of the calls of this process from now on. Return a function that stops this.

    Call it in each worker: one trace then shows a request through all workers that it reaches. The provider decides
    where the spans go. Its sampler decides which spans are recorded: with a ParentBased sampler, a callee follows its
    caller's decision.

    - A span of kind CLIENT for each call, from `rpc_sync`, `rpc_async` or `remote` to the reply.
    - A span of kind SERVER for each call that another worker makes to this one, until the result is complete, also for
      an `async def` function or a function that returns a future. It is a child of the caller's span. Calls that a
      Python function makes are children of its span, also calls in callbacks that it adds to futures (`then`).
      Operators, script functions and C++ functions run without Python: their spans are made when they have ended, so
      calls that they make are not children of these spans.
    - A span `torchrpc.backward` for each backward pass, on the worker that starts it.

    Spans have the attributes `rpc.system` ("torchrpc"), `rpc.method`, `torchrpc.worker` and `torchrpc.peer`.

    Args:
        tracer_provider (opentelemetry.trace.TracerProvider): default: OpenTelemetry's global one.

    Raises:
        ModuleNotFoundError: opentelemetry-api is not installed.

    There is one provider at a time: a later call replaces the provider of an earlier one. Any thread may call it.
    """
    global _current
    tracing = _Tracing(tracer_provider)
    with _lock:
        _current = tracing
        profiling.call_in_span = tracing.call
        futures.in_context = _in_context
        dist_autograd._in_span = tracing.backward
        _C._set_tracing(tracing.serve, tracing.record)

    def stop() -> None:
        global _current
        with _lock:
            if _current is not tracing:
                return
            _current = profiling.call_in_span = futures.in_context = dist_autograd._in_span = None
            _C._set_tracing(None, None)

    return stop
