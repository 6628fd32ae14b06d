#include "transport/frame_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <string>

#include "transport/buffer_cache.h"
#include "wire/tensor_codec.h"

namespace torchrpc {

Status checkSize(const char* part, uint64_t bytes, uint64_t limit) {
  if (bytes <= limit) return std::nullopt;
  return Error(
      ErrorCode::kFrameTooLarge,
      std::string("a message's ") + part + " has " + std::to_string(bytes) + " bytes, more than the limit of " +
          std::to_string(limit));
}

Status FrameSize::add(const char* part, uint64_t bytes, uint64_t limit) {
  if (auto error = checkSize(part, bytes, limit)) return error;
  if (bytes <= limits_.frame_bytes - bytes_) {
    bytes_ += bytes;
    return std::nullopt;
  }
  return Error(
      ErrorCode::kFrameTooLarge,
      "a message has more bytes than the limit of " + std::to_string(limits_.frame_bytes) + " for all its parts");
}

Status checkFrame(const Frame& frame, const Limits& limits) {
  FrameSize size(limits);
  if (auto error = size.add("head", frame.head.size(), limits.head_bytes)) return error;
  for (const auto& segment : frame.segments) {
    if (auto error = size.add("segment", segment.bytes, limits.segment_bytes)) return error;
  }
  if (frame.segments.size() <= limits.tensors) return std::nullopt;
  return Error(
      ErrorCode::kFrameTooLarge,
      "a message has " + std::to_string(frame.segments.size()) + " segments, more than the limit of " +
          std::to_string(limits.tensors));
}

namespace {

constexpr size_t kMinCachedBytes = 512 << 10;
constexpr size_t kMaxUnusedBytes = 128 << 20;

c10::DataPtr newMemory(size_t bytes) {
  if (bytes < kMinCachedBytes) return c10::GetCPUAllocator()->allocate(bytes);
  // Never destroyed: tensors may be destroyed while the process exits.
  static auto& cache = *new BufferCache(kMaxUnusedBytes);
  return cache.allocate(bytes);
}

}  // namespace

bool isFrameDeleter(c10::DeleterFnPtr deleter) {
  return deleter == c10::GetCPUAllocator()->raw_deleter() || deleter == BufferCache::deleter() ||
      deleter == &std::free || deleter == &c10::detail::deleteNothing || deleter == nullptr;
}

Segment newSegment(size_t bytes) { return {storageOf(newMemory(bytes), bytes), 0, bytes}; }

}  // namespace torchrpc
