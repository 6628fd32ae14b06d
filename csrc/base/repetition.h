#pragma once

// How the agent repeats a request. This part of a message is not sent: it stays on the caller.

#include <string>

#include "torchrpc/retry.h"  // IWYU pragma: export

namespace torchrpc {

struct Repetition {
  RetryPolicy policy;
  std::string key;  ///< the program's key; empty: the agent numbers the call
};

/// The limit on the length of a key.
constexpr size_t kMaxKeyBytes = 256;

/// Throws Error(kInvalidArgument) if the policy or the key is not valid.
void requireUsable(const Repetition& repetition);

}  // namespace torchrpc
