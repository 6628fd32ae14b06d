#pragma once

// Random numbers: secure ones for secrets and nonces, and others for ids that only must not collide. Threads: any.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/sync/mutex.h"

namespace torchrpc {

/// Returns bytes of the kernel's generator (getrandom, arc4random_buf). Blocks until that is seeded.
std::string secureRandomBytes(size_t bytes);

uint64_t randomNumber();

/// A generator for many secure random numbers: it reads kAtATime of them from the kernel at a time. A forked child must
/// not use an object of its parent, because both would return the same numbers.
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
