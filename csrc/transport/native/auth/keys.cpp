#include "transport/native/auth/keys.h"

#include <algorithm>
#include <sodium.h>

#include "base/error.h"

namespace torchrpc::native {

static_assert(kKeyBytes == crypto_auth_hmacsha256_BYTES);

SecretKey::SecretKey(std::string_view bytes) {
  if (bytes.size() != kKeyBytes) throw Error(ErrorCode::kProtocol, "a key of another size than expected");
  std::ranges::copy(bytes, bytes_.begin());
}

SecretKey::~SecretKey() { sodium_memzero(bytes_.data(), bytes_.size()); }

void initializeSodium() {
  static const bool is_ready = sodium_init() >= 0;
  if (is_ready) return;
  throw Error(
      ErrorCode::kRendezvous,
      "libsodium, which authenticates and encrypts connections, cannot be initialized: the system gives no random "
      "numbers (is /dev/urandom missing?)");
}

SecretKey hmac(std::string_view key, std::initializer_list<std::string_view> parts) {
  const auto bytes = [](std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); };
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, bytes(key), key.size());
  for (const auto part : parts) crypto_auth_hmacsha256_update(&state, bytes(part), part.size());
  SecretKey out;
  crypto_auth_hmacsha256_final(&state, out.data());
  sodium_memzero(&state, sizeof(state));
  return out;
}

SecretKey keyOfSecret(std::string_view secret) { return hmac(secret, {"torchrpc: the key of connections"}); }

}  // namespace torchrpc::native
