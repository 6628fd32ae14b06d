#include "transport/native/auth/libcrypto.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sodium.h>

#include "base/os/libraries.h"

namespace torchrpc::native {

namespace {

// Constants of <openssl/evp.h> and <openssl/crypto.h>.
constexpr int kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG

/// Loads libcrypto, which is never unloaded because it does not support that.
std::optional<Libcrypto> load() {
  os::SharedLibrary file("crypto", kOpensslVersion);
  const auto find = [&](const char* name, auto& function) { file.find(name, function); };
  Libcrypto library{};
  find("EVP_CIPHER_CTX_new", library.new_context);
  find("EVP_CIPHER_CTX_free", library.free_context);
  find("EVP_EncryptInit_ex", library.begin_sealing);
  find("EVP_DecryptInit_ex", library.begin_opening);
  find("EVP_EncryptUpdate", library.seal);
  find("EVP_DecryptUpdate", library.open);
  find("EVP_EncryptFinal_ex", library.end_sealing);
  find("EVP_DecryptFinal_ex", library.end_opening);
  find("EVP_CIPHER_CTX_ctrl", library.control);
  find("ERR_clear_error", library.clear_errors);
  int (*initialize)(uint64_t options, const void* settings) = nullptr;
  find("OPENSSL_init_crypto", initialize);
  Libcrypto::Type* (*fetch)(void* context, const char* algorithm, const char* properties) = nullptr;
  find("EVP_CIPHER_fetch", fetch);
  if (!file.isComplete()) return std::nullopt;
  // Disables libcrypto's cleanup at exit, because threads may still seal and open while the process exits. If libcrypto
  // is initialized already, this fails without harm: the type, which is not fetched again, and the contexts outlive the
  // cleanup, too.
  initialize(kOpensslNoCleanup, nullptr);
  library.aes_256_gcm = fetch(nullptr, "AES-256-GCM", nullptr);
  if (library.aes_256_gcm != nullptr) return library;
  library.clear_errors();
  return std::nullopt;
}

}  // namespace

const Libcrypto* Libcrypto::find() {
  static const auto library = load();
  return library ? &*library : nullptr;
}

LibcryptoAes::LibcryptoAes(const Libcrypto& library)
    : library_(library), context_(library.new_context(), library.free_context) {
  if (!context_) fail();
}

void LibcryptoAes::setKey(const SecretKey& key) {
  key_ = key;
  use_ = Use::kNone;
}

LibcryptoAes::Begin LibcryptoAes::beginFor(Use use) {
  if (use_ == use) return {};
  use_ = use;
  return {library_.aes_256_gcm, key_.data()};
}

bool LibcryptoAes::fail() {
  has_failed_ = true;
  library_.clear_errors();  // the thread may be the program's, which may use OpenSSL itself
  return false;
}

bool LibcryptoAes::seal(const Nonce& nonce, std::string_view associated, std::span<const char> plain, char* out) {
  if (has_failed_) return false;
  auto* const context = context_.get();
  const auto [type, key] = beginFor(Use::kSealing);
  int done = 0, rest = 0;
  const bool is_sealed = library_.begin_sealing(context, type, nullptr, key, nonce.data()) > 0 &&
      (associated.empty() ||
       library_.seal(context, nullptr, &done, asUnsigned(associated.data()), static_cast<int>(associated.size())) >
           0) &&
      (plain.empty() ||
       library_.seal(context, asUnsigned(out), &done, asUnsigned(plain.data()), static_cast<int>(plain.size())) > 0) &&
      library_.end_sealing(context, asUnsigned(out) + plain.size(), &rest) > 0 &&
      library_.control(context, kGetTag, kTagBytes, out + plain.size()) > 0;
  return is_sealed || fail();
}

bool LibcryptoAes::open(const Nonce& nonce, std::string_view associated, std::span<const char> sealed, char* out) {
  if (has_failed_ || sealed.size() < kTagBytes) return false;
  auto* const context = context_.get();
  const auto bytes = sealed.size() - kTagBytes;
  std::array<unsigned char, kTagBytes> tag;
  std::copy_n(asUnsigned(sealed.data()) + bytes, kTagBytes, tag.begin());
  const auto [type, key] = beginFor(Use::kOpening);
  int done = 0, rest = 0;
  const bool is_decrypted = library_.begin_opening(context, type, nullptr, key, nonce.data()) > 0 &&
      library_.control(context, kSetTag, kTagBytes, tag.data()) > 0 &&
      (associated.empty() ||
       library_.open(context, nullptr, &done, asUnsigned(associated.data()), static_cast<int>(associated.size())) >
           0) &&
      (bytes == 0 ||
       library_.open(context, asUnsigned(out), &done, asUnsigned(sealed.data()), static_cast<int>(bytes)) > 0);
  if (!is_decrypted) fail();
  if (is_decrypted && library_.end_opening(context, asUnsigned(out) + bytes, &rest) > 0) return true;
  // No unauthenticated plaintext is left behind.
  sodium_memzero(out, bytes);
  library_.clear_errors();
  return false;
}

}  // namespace torchrpc::native
