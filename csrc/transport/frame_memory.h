#pragma once

// The memory of frames, for all transports: checks against the limits, and allocation for received frames.

#include <c10/core/Storage.h>

#include <cstddef>

#include "base/result.h"
#include "wire/limits.h"
#include "wire/message.h"

namespace torchrpc {

/// Returns kFrameTooLarge, with the size and the limit in the text, if the frame exceeds `limits`.
Status checkFrame(const Frame& frame, const Limits& limits);

/// Does the same for one part of a frame. `part` is "head" or "segment".
Status checkSize(const char* part, uint64_t bytes, uint64_t limit);

/// Adds up the sizes that a peer announces, before memory is allocated for any of them.
class FrameSize {
 public:
  explicit FrameSize(const Limits& limits) : limits_(limits) {}
  /// Checks the next part as checkSize() does, and then the total of all parts. The sums do not overflow.
  Status add(const char* part, uint64_t bytes, uint64_t limit);
  uint64_t bytes() const { return bytes_; }

 private:
  const Limits& limits_;
  uint64_t bytes_ = 0;
};

/// Returns a segment with new, uninitialised memory: from torch's CPU allocator or, if it is large, from a BufferCache.
/// Throws the exceptions of these allocators.
Segment newSegment(size_t bytes);

/// Whether this is a deleter of malloc, of torch's CPU allocator or of newSegment(): freeing such memory runs no
/// foreign code. Also true for memory without a deleter.
bool isFrameDeleter(c10::DeleterFnPtr deleter);

}  // namespace torchrpc
