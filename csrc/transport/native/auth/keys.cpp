#include "transport/native/auth/keys.h"

#include <algorithm>
#include <sodium.h>

#include "base/error.h"
#include "base/hmac.h"

namespace torchrpc::native {

static_assert(kKeyBytes == kHmacBytes);

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
  auto bytes = hmacSha256(key, parts);
  const SecretKey out(bytes);
  sodium_memzero(bytes.data(), bytes.size());
  return out;
}

SecretKey keyOfSecret(std::string_view secret) { return hmac(secret, {"torchrpc: the key of connections"}); }

}  // namespace torchrpc::native
