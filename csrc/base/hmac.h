#pragma once

// HMAC-SHA-256, from libsodium: for what the workers of a group publish in their store. Threads: any.

#include <cstddef>
#include <string>
#include <string_view>

namespace torchrpc {

constexpr size_t kHmacBytes = 32;

/// The HMAC-SHA-256 of `message`. The key may have any length.
std::string hmacSha256(std::string_view key, std::string_view message);

/// Whether two texts are equal. The time that it takes depends on their lengths only.
bool isEqualInConstantTime(std::string_view left, std::string_view right);

}  // namespace torchrpc
