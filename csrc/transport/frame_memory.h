#pragma once

// What every transport does with the memory of frames: hold it to the limits, make room for what arrives.

#include <cstddef>

#include "base/result.h"
#include "wire/limits.h"
#include "wire/message.h"

namespace torchrpc {

/// kFrameTooLarge, with the numbers, if the frame is larger than allowed.
Status checkFrame(const Frame& frame, const Limits& limits);

/// The same for one part: `what` is "head" or "segment".
Status checkSize(const char* what, uint64_t bytes, uint64_t limit);

/// Memory of its own, not initialised: from torch's CPU allocator or, where large, from a cache of blocks. Throws what
/// allocators throw.
Segment newSegment(size_t bytes);

}  // namespace torchrpc
