// Traces of calls: the contexts of the spans that torchrpc.observe makes.

#include <torch/csrc/jit/python/pybind_utils.h>

#include <utility>

#include "bindings/bind.h"
#include "bindings/py_future.h"
#include "bindings/py_gil.h"
#include "bindings/py_tracing.h"
#include "profiling/expected_call.h"
#include "wire/callable_name.h"
#include "wire/trace_context.h"

namespace torchrpc::bindings {

std::atomic<bool> tracing_detail::on{false};

namespace {

thread_local std::optional<std::string> next_context;

/// The function of torchrpc.observe that serves a call inside a span; leaked, because threads may outlive the
/// interpreter.
py::object& serveInSpan() {
  static auto* const function = new py::object();
  return *function;
}

bool areCallsShown() { return areCallsProfiled() || isTracingOn(); }

}  // namespace

std::optional<std::string> takeNextTraceContext() { return std::exchange(next_context, std::nullopt); }

void wrapInSpan(const Invocation& invocation, py::object& function, py::tuple& args, py::dict& kwargs) {
  const auto serve = serveInSpan();
  if (!serve || serve.is_none()) return;
  const auto context = traceContextOf(invocation.message).value_or(TraceContext());
  args = py::make_tuple(
      function, args, kwargs, context.parent, context.state, invocation.from.name,
      callableName(invocation.message.kind, invocation.message.payload));
  kwargs = py::dict();
  function = serve;
}

void bindTracing(py::module_& module) {
  bindPredicate<areCallsShown>(module, "_calls_are_shown");
  module.def(
      "_set_tracing",
      [](py::object serve) {
        tracing_detail::on = !serve.is_none();
        serveInSpan() = std::move(serve);
      },
      py::arg("serve"), "The function that serves a call inside a span; None: no spans any more.");
  module.def(
      "_set_next_trace_context",
      [](const std::string& parent, const std::string& state) {
        const TraceContext context{parent, state};
        next_context = isValid(context) ? std::optional(encode(context)) : std::nullopt;
      },
      py::arg("parent"), py::arg("state"),
      "The W3C trace context of the next call of this thread. One that is not valid unsets it.");
  module.def(
      "_when_call_ends",
      [](const std::shared_ptr<torch::jit::PythonFutureWrapper>& future, const py::object& done) {
        // The thread that completes the future destroys its copy without the GIL.
        auto* const kept = done.inc_ref().ptr();
        const py::gil_scoped_release no_gil;
        future->fut->addCallback([kept](c10::ivalue::Future& ended) {
          const auto error = ended.hasError() ? ended.tryRetrieveErrorMessage() : std::string();
          const AcquireGil gil;
          try {
            py::reinterpret_steal<py::object>(kept)(error);
          } catch (py::error_already_set& e) {
            e.discard_as_unraisable("the end of a span");
          }
        });
      },
      py::arg("future"), py::arg("done"),
      "Calls `done` with the error's text, '' without one, when the future is complete. Does not look at its value.");
}

}  // namespace torchrpc::bindings
