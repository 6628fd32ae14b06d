#pragma once

// Random numbers: for what must not be guessed, and for what only must not collide. Threads: any.

#include <cstddef>
#include <cstdint>
#include <string>

namespace torchrpc {

/// From the kernel's generator, once it is seeded.
std::string secureRandomBytes(size_t bytes);

uint64_t randomNumber();

}  // namespace torchrpc
