#pragma once

// Traces of calls: torchrpc.observe makes the spans, these functions carry their contexts. While tracing is off, a call
// costs one relaxed load on each side. All functions but isTracingOn() need the GIL.

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

/// The header for the next call of this thread, which is forgotten; empty: none.
std::optional<std::string> takeNextTraceContext();

/// If tracing is on: from now on the node's calls of operators, script functions and C++ functions are recorded as
/// spans, when they have ended, because they run without Python.
void traceServedCalls(const std::shared_ptr<Node>& node);

/// Replaces a call of another worker by that of a function which makes it inside a span, and returns what it returns,
/// or a coroutine around that.
void wrapInSpan(const Invocation& invocation, py::object& function, py::tuple& args, py::dict& kwargs);

}  // namespace torchrpc::bindings
