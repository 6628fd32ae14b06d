#pragma once

// Traces of calls. torchrpc.observe makes the spans, and these functions pass the trace contexts of the spans. While
// tracing is off, a call costs one relaxed load on each side. All functions but isTracingOn() need the GIL.

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "node/node.h"
#include "wire/message.h"

namespace torchrpc::bindings {

namespace py = pybind11;

namespace tracing_detail {
extern std::atomic<bool> on;
}
inline bool isTracingOn() { return tracing_detail::on.load(std::memory_order_relaxed); }

/// Returns and clears the trace context, encoded as a header, of the next call of this thread; nullopt if there is
/// none.
std::optional<std::string> takeNextTraceContext();

/// If tracing is on, the calls of operators, script functions and C++ functions that the node serves from now on are
/// recorded as spans. They are recorded after they have ended, because they run without Python.
void traceServedCalls(const std::shared_ptr<Node>& node);

/// Replaces the function and the arguments of a received call by those of a function that runs the call inside a span.
/// It returns the result of the call, or a coroutine around it.
void wrapInSpan(const Invocation& invocation, py::object& function, py::tuple& args, py::dict& kwargs);

}  // namespace torchrpc::bindings
