#pragma once

// Shared by the fuzzers. The first bytes of an input determine how the rest is used.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "wire/tensor_codec.h"

namespace torchrpc::fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}
  /// The next byte; 0 at the end.
  uint8_t byte() {
    if (rest_.empty()) return 0;
    const auto first = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return first;
  }
  /// Up to three segments, beside a head.
  std::vector<Segment> segments() {
    std::vector<Segment> out(byte() % 4);
    for (auto& segment : out) {
      const size_t bytes = byte() * size_t{256};
      segment = {makeStorage(bytes), 0, bytes, /*is_shared=*/bytes % 512 == 0};
      if (bytes > 0) std::memset(segment.mutableData(), 1, bytes);
    }
    return out;
  }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

/// Hostile bytes may be refused only with these errors.
inline void expectRefusal(const Error& error, bool or_argument = false) {
  const auto code = error.code();
  const bool expected = code == ErrorCode::kProtocol || code == ErrorCode::kFrameTooLarge ||
      (or_argument && code == ErrorCode::kInvalidArgument);
  if (!expected) std::abort();
}

/// Aborts unless `holds`.
inline void expect(bool holds) {
  if (!holds) std::abort();
}

/// Small limits, so that a violation shows in the memory that is allocated.
inline Limits limits() {
  Limits limits;
  limits.head_bytes = 1 << 20;
  limits.segment_bytes = 1 << 20;
  limits.frame_bytes = 3 << 20;
  limits.tensors = 64;
  limits.depth = 100;
  return limits;
}

}  // namespace torchrpc::fuzz
