#pragma once

// Random numbers: secure ones for secrets and nonces, others for ids that must only not collide. Threads: any.

#include <cstddef>
#include <cstdint>
#include <string>

namespace torchrpc {

/// From the kernel's generator (getrandom, arc4random_buf); blocks until it is seeded.
std::string secureRandomBytes(size_t bytes);

uint64_t randomNumber();

}  // namespace torchrpc
