#pragma once

// Random numbers: secure ones for secrets and nonces, others for ids that must only not collide. Threads: any.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/sync/mutex.h"

namespace torchrpc {

/// From the kernel's generator (getrandom, arc4random_buf); blocks until it is seeded.
std::string secureRandomBytes(size_t bytes);

uint64_t randomNumber();

/// Secure numbers, many of them: it asks the kernel for several at a time. A forked child must not use its parent's.
class SecureNumbers {
 public:
  uint64_t next();

 private:
  static constexpr size_t kAtATime = 64;

  Mutex mutex_;
  std::array<uint64_t, kAtATime> numbers_ TORCHRPC_GUARDED_BY(mutex_) = {};
  size_t left_ TORCHRPC_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchrpc
