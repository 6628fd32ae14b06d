#include "transport/frame_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <string>

namespace torchrpc {

Status checkSize(const char* what, uint64_t bytes, uint64_t limit) {
  if (bytes <= limit) return std::nullopt;
  return Error(
      ErrorCode::kFrameTooLarge,
      std::string("a message's ") + what + " has " + std::to_string(bytes) + " bytes, more than the limit of " +
          std::to_string(limit));
}

Status checkFrame(const Frame& frame, const Limits& limits) {
  if (auto error = checkSize("head", frame.head.size(), limits.head_bytes)) return error;
  for (const auto& segment : frame.segments) {
    if (auto error = checkSize("segment", segment.bytes, limits.segment_bytes)) return error;
  }
  if (frame.segments.size() <= limits.tensors) return std::nullopt;
  return Error(
      ErrorCode::kFrameTooLarge,
      "a message has " + std::to_string(frame.segments.size()) + " segments, more than the limit of " +
          std::to_string(limits.tensors));
}

Segment newSegment(size_t bytes) {
  // Resizable like the storage of any tensor that torch makes: it becomes one.
  return {
      c10::Storage(c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes), c10::GetCPUAllocator(), true), 0,
      bytes};
}

}  // namespace torchrpc
