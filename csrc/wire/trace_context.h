#pragma once

// The header TraceContext: the W3C trace context of a call, by which tracing tools join the spans of several workers.
// The core only carries it. PROTOCOL.md, "Traces", specifies the bytes.
// Threads: values.

#include <optional>
#include <string>

#include "wire/message.h"

namespace torchrpc {

struct TraceContext {
  std::string parent;  ///< "traceparent": 00-<trace id>-<span id>-<flags>, lower-case hexadecimal
  std::string state;   ///< "tracestate"; may be empty
};

constexpr size_t kMaxTraceStateBytes = 512;

/// Whether both fields may travel: W3C's syntax of version 00 for `parent`, printable ASCII in bounds for `state`.
bool isValid(const TraceContext& context);
/// The bytes of the header. Throws Error(kInvalidArgument) unless it is valid.
std::string encode(const TraceContext& context);
/// That of a message. Empty if the header is missing, or is not valid: then the callee begins a trace of its own.
std::optional<TraceContext> traceContextOf(const Message& message);

}  // namespace torchrpc
