#pragma once

// How the agent repeats a request: a part of the message that stays on the caller.

#include <string>

#include "torchrpc/retry.h"  // IWYU pragma: export

namespace torchrpc {

struct Repetition {
  RetryPolicy policy;
  std::string key;  ///< the program's; empty: the agent numbers the call
};

/// Bytes of a key.
constexpr size_t kMaxKeyBytes = 256;

/// Throws Error(kInvalidArgument) for a policy or a key that cannot be used.
void requireUsable(const Repetition& repetition);

}  // namespace torchrpc
