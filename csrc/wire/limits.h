#pragma once

#include <cstddef>
#include <cstdint>

namespace torchrpc {

/// What a frame may hold at most. Checked before sending (clear error, nothing sent) and when decoding.
struct Limits {
  uint64_t head_bytes = uint64_t{1} << 32;     ///< everything but out-of-line tensor data
  uint64_t segment_bytes = uint64_t{1} << 40;  ///< one tensor's data
  uint32_t tensors = 1u << 20;                 ///< tensors a message
  uint32_t headers = 64;                       ///< optional headers a message
  uint32_t depth = 1000;                       ///< nesting of containers in a value
};

}  // namespace torchrpc
