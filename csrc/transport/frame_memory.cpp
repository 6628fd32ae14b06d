#include "transport/frame_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <string>

#include "transport/buffer_cache.h"
#include "wire/tensor_codec.h"

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

namespace {

constexpr size_t kCachedFrom = 512 << 10;
constexpr size_t kKept = 128 << 20;

c10::DataPtr newMemory(size_t bytes) {
  if (bytes < kCachedFrom) return c10::GetCPUAllocator()->allocate(bytes);
  static auto& blocks = *new BufferCache(kKept);  // tensors may go while the process exits
  return blocks.allocate(bytes);
}

}  // namespace

Segment newSegment(size_t bytes) { return {storageOf(newMemory(bytes), bytes), 0, bytes}; }

}  // namespace torchrpc
