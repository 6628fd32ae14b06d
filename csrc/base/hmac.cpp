#include "base/hmac.h"

#include <sodium.h>

namespace torchrpc {

static_assert(kHmacBytes == crypto_auth_hmacsha256_BYTES);

std::string hmacSha256(std::string_view key, std::initializer_list<std::string_view> parts) {
  const auto bytesOf = [](std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); };
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, bytesOf(key), key.size());
  for (const auto part : parts) crypto_auth_hmacsha256_update(&state, bytesOf(part), part.size());
  std::string out(kHmacBytes, '\0');
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(out.data()));
  sodium_memzero(&state, sizeof(state));
  return out;
}

bool isEqualInConstantTime(std::string_view left, std::string_view right) {
  return left.size() == right.size() && sodium_memcmp(left.data(), right.data(), left.size()) == 0;
}

}  // namespace torchrpc
