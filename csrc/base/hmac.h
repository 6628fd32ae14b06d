#pragma once

// HMAC-SHA-256, from libsodium. Threads: any.

#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>

namespace torchrpc {

constexpr size_t kHmacBytes = 32;

/// Returns the HMAC-SHA-256 of the concatenated `parts`. The key may have any length.
std::string hmacSha256(std::string_view key, std::initializer_list<std::string_view> parts);

/// Whether two texts are equal. The run time depends on their lengths only.
bool isEqualInConstantTime(std::string_view left, std::string_view right);

}  // namespace torchrpc
