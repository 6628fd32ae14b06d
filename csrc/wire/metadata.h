#pragma once

// The metadata of a call, as headers of its message. PROTOCOL.md, "Metadata", specifies the bytes.
// Threads: values.

#include "base/metadata.h"
#include "wire/message.h"

namespace torchrpc {

constexpr size_t kMaxMetadata = 128;
constexpr size_t kMaxMetadataNameBytes = 256;
constexpr size_t kMaxMetadataBytes = 16 << 10;  ///< names and texts together

/// Replaces the metadata of a message. "traceparent" and "tracestate" become its header TraceContext. Throws
/// Error(kInvalidArgument) for metadata beyond the limits, and for a trace context that is not valid.
void setMetadata(Message& message, const Metadata& metadata);
/// That of a message. Throws Error(kProtocol) for malformed bytes; without a valid trace context there is none.
Metadata metadataOf(const Message& message);

}  // namespace torchrpc
