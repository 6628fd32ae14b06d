#pragma once

// Random bytes for what must not be guessed. Apart from ids and incarnations, which only must not collide.
// Threads: any.

#include <cstddef>
#include <string>

namespace torchrpc {

/// From the kernel's generator, once it is seeded.
std::string unguessable(size_t bytes);

}  // namespace torchrpc
