#pragma once

// The distance to keep between data that threads on different cores write often. Not
// std::hardware_destructive_interference_size, because its value may differ between compilers, and ours is part of the
// layout of memory that processes share.

#include <cstddef>

namespace torchrpc {

/// Two cache lines of 64 bytes, because x86 fetches lines in pairs, or one of 128, which some aarch64 processors have.
constexpr size_t kDestructiveInterferenceBytes = 128;

}  // namespace torchrpc
