#pragma once

// The header TraceContext: the W3C trace context of a call, by which tracing tools join the spans of several workers.
// The core only sends and receives it. PROTOCOL.md, "Traces", specifies the bytes.
// Threads: any; no state.

#include <optional>
#include <string>

#include "wire/message.h"

namespace torchrpc {

struct TraceContext {
  std::string parent;  ///< "traceparent": 00-<trace id>-<span id>-<flags>, lower-case hexadecimal
  std::string state;   ///< "tracestate"; may be empty
};

constexpr size_t kMaxTraceStateBytes = 512;

/// Whether both fields may be sent: `parent` must have W3C's syntax of version 00, `state` must be printable ASCII of
/// at most kMaxTraceStateBytes.
bool isValid(const TraceContext& context);
/// Returns the bytes of the header. Throws Error(kInvalidArgument) if the context is not valid.
std::string encode(const TraceContext& context);
/// Returns the trace context of a message; nullopt if the header is missing or not valid: then the callee begins a new
/// trace.
std::optional<TraceContext> traceContextOf(const Message& message);

}  // namespace torchrpc
