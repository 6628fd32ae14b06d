#pragma once

#include <cstddef>
#include <cstdint>

namespace torchrpc {

/// The limits on the sizes in a frame. A sender checks them before it sends anything; a receiver checks them before it
/// allocates memory, and when it decodes.
struct Limits {
  uint64_t head_bytes = uint64_t{1} << 32;     ///< the head: everything but segments
  uint64_t segment_bytes = uint64_t{1} << 40;  ///< the data of one tensor
  uint64_t frame_bytes = uint64_t{1} << 40;    ///< the head and all segments together
  uint32_t tensors = 1u << 20;                 ///< tensors in a message
  uint32_t headers = 64;                       ///< headers in a message
  uint32_t depth = 1000;                       ///< nested containers in a value
  /// Sent tensors carry their elements only. Otherwise the memory between the elements of a view, and the rest of a
  /// small storage, may travel, too, which saves copies.
  bool hides_gaps = false;
};

}  // namespace torchrpc
