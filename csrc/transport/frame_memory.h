#pragma once

// The memory of frames, for all transports: checks against the limits, and allocation for frames that arrive.

#include <c10/core/Storage.h>

#include <cstddef>

#include "base/result.h"
#include "wire/limits.h"
#include "wire/message.h"

namespace torchrpc {

/// kFrameTooLarge, with the size and the limit, if the frame is larger than `limits` allow.
Status checkFrame(const Frame& frame, const Limits& limits);

/// The same for one part of a frame: `part` is "head" or "segment".
Status checkSize(const char* part, uint64_t bytes, uint64_t limit);

/// Adds up the sizes that a peer announces, before memory is allocated for any of them.
class FrameSize {
 public:
  explicit FrameSize(const Limits& limits) : limits_(limits) {}
  /// checkSize() for the next part, and the same for all parts together. No sum overflows.
  Status add(const char* part, uint64_t bytes, uint64_t limit);
  uint64_t bytes() const { return bytes_; }

 private:
  const Limits& limits_;
  uint64_t bytes_ = 0;
};

/// A segment with memory of its own, not initialised: from torch's CPU allocator or, if it is large, from a
/// BufferCache. Throws the exceptions of these allocators.
Segment newSegment(size_t bytes);

/// Whether memory with this deleter is malloc's, torch's CPU allocator's or newSegment()'s: to free it runs no foreign
/// code.
bool isFrameDeleter(c10::DeleterFnPtr deleter);

}  // namespace torchrpc
