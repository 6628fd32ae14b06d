#include "group/store_seal.h"

#include "base/error.h"
#include "base/hmac.h"
#include "wire/codec.h"

namespace torchrpc {

StoreSeal::StoreSeal(std::string_view secret) : key_(secret.empty() ? "" : hmacSha256(secret, {"torchrpc store"})) {}

void StoreSeal::bindTo(std::string_view records) { group_ = key_.empty() ? "" : hmacSha256(key_, {records}); }

namespace {
constexpr std::string_view kMark = "sealed:";  // so that a worker without a secret does not take it for a plain value
}

std::string StoreSeal::seal(std::string_view key, std::string_view value) const {
  return key_.empty() ? std::string(value) : std::string(kMark) + tag(key, value) + std::string(value);
}

std::string StoreSeal::open(std::string_view key, std::string_view stored, const std::string& what) const {
  const bool is_sealed = stored.starts_with(kMark);
  if (key_.empty() && !is_sealed) return std::string(stored);
  if (!key_.empty() && is_sealed) {
    stored.remove_prefix(kMark.size());
    const auto value = stored.substr(std::min(stored.size(), kHmacBytes));
    if (isEqualInConstantTime(stored.substr(0, kHmacBytes), tag(key, value))) return std::string(value);
  }
  throw Error(
      ErrorCode::kRendezvous,
      "the store has " + what +
          " that was not made with the secret of the group: either a worker was given another secret (give all the "
          "same TORCHRPC_SECRET_FILE, TORCHRPC_SECRET or option secret), or one has another transport, which takes "
          "none (give all the same TORCHRPC_TRANSPORT or option transport), or someone who can write to the store, but "
          "does not know the secret, has changed it");
}

std::string StoreSeal::tag(std::string_view key, std::string_view value) const {
  // Writes each part with its length, so that no two lists of parts have the same bytes.
  std::string message;
  Writer writer(message);
  writer.putString(key);
  writer.putString(group_);
  writer.putString(value);
  return hmacSha256(key_, {message});
}

}  // namespace torchrpc
