#pragma once

#include <cstdint>
#include <cstdlib>

namespace torchrpc::test {

/// The number in an environment variable, or `fallback` if it is not set.
inline uint64_t environment(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : fallback;
}

}  // namespace torchrpc::test
