#pragma once

// The metadata of a call, as headers of its message. PROTOCOL.md, "Metadata", specifies the bytes.
// Threads: any; no state.

#include "base/metadata.h"
#include "wire/message.h"

namespace torchrpc {

constexpr size_t kMaxMetadata = 128;
constexpr size_t kMaxMetadataNameBytes = 256;
constexpr size_t kMaxMetadataBytes = 16 << 10;  ///< names and texts together

/// Replaces the metadata of a message. "traceparent" and "tracestate" become its header TraceContext. Throws
/// Error(kInvalidArgument) if the metadata exceeds the limits, or if the trace context is not valid.
void setMetadata(Message& message, const Metadata& metadata);
/// Returns the metadata of a message. Throws Error(kProtocol) for malformed bytes, but omits a trace context that is
/// not valid.
Metadata metadataOf(const Message& message);

}  // namespace torchrpc
