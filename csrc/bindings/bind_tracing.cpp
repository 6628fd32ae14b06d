// Traces of calls: the contexts of the spans that torchrpc.observe makes.

#include <torch/csrc/jit/python/pybind_utils.h>

#include <chrono>
#include <utility>

#include "bindings/bind.h"
#include "bindings/current_node.h"
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

/// The functions of torchrpc.observe that serve a call inside a span, and that record a call that has ended as a span.
/// They are leaked, because threads may outlive the interpreter.
py::object& serveInSpan() {
  static auto* const function = new py::object();
  return *function;
}
py::object& recordSpan() {
  static auto* const function = new py::object();
  return *function;
}

int64_t nanosecondsNow() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

/// A call that ran without Python.
struct ServedSpan {
  std::string function, caller, parent, state;
  int64_t begin_ns = nanosecondsNow();  ///< since 1970
  int64_t end_ns = 0;
  std::string error{};

  void record() const {
    const AcquireGil gil;
    const auto to = recordSpan();
    if (!to || to.is_none()) return;
    try {
      to(function, caller, parent, state, begin_ns, end_ns, error);
    } catch (py::error_already_set& e) {
      e.discard_as_unraisable("a span");
    }
  }
};

class ServedSpans final : public Interceptor {
 public:
  explicit ServedSpans(const std::shared_ptr<Node>& node) : node_(node) {}

  End onServe(const IncomingCall& call) override {
    if (!isTracingOn() || call.kind == FunctionKind::kPython) return {};
    const auto text = [&call](const char* name) {
      const auto found = call.metadata.find(name);
      return found == call.metadata.end() ? std::string() : found->second;
    };
    const auto span = std::make_shared<ServedSpan>(ServedSpan{
        .function = call.function,
        .caller = call.caller.name,
        .parent = text("traceparent"),
        .state = text("tracestate")});
    return [node = node_, span](const Error* error) {
      span->end_ns = nanosecondsNow();
      if (error) span->error = error->text();
      if (const auto alive = node.lock()) alive->agent().post([span] { span->record(); });
    };
  }

 private:
  const std::weak_ptr<Node> node_;
};

bool areCallsShown() { return areCallsProfiled() || isTracingOn(); }

}  // namespace

void traceServedCalls(const std::shared_ptr<Node>& node) {
  if (isTracingOn() && node->interceptors().isEmpty()) node->interceptors().add(std::make_shared<ServedSpans>(node));
}

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
      [](py::object serve, py::object record) {
        tracing_detail::on = !serve.is_none();
        serveInSpan() = std::move(serve);
        if (!record.is_none()) recordSpan() = std::move(record);  // calls that end later are still recorded
        if (const auto node = currentNodeIfOurs()) traceServedCalls(node);
      },
      py::arg("serve"), py::arg("record"),
      "The functions that serve a call inside a span, and that record one that has ended as a span; None: no spans of "
      "later calls.");
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
        // A raw pointer, because the thread that completes the future destroys the callback without the GIL.
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
