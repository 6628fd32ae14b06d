#include "transport/native/auth/record_cipher.h"

#include <array>
#include <optional>
#include <sodium.h>

#include "transport/native/auth/libcrypto.h"

namespace torchrpc::native {

static_assert(kKeyBytes == crypto_aead_aes256gcm_KEYBYTES && kTagBytes == crypto_aead_aes256gcm_ABYTES);
static_assert(crypto_aead_aes256gcm_NPUBBYTES == crypto_aead_chacha20poly1305_ietf_NPUBBYTES);

namespace {

/// Four zero bytes, then the number in the byte order that Noise specifies for the cipher.
std::array<unsigned char, crypto_aead_aes256gcm_NPUBBYTES> recordNonce(Cipher cipher, uint64_t number) {
  std::array<unsigned char, crypto_aead_aes256gcm_NPUBBYTES> nonce{};
  for (size_t i = 0; i < sizeof(number); ++i) {
    const auto byte = static_cast<unsigned char>(number >> (8 * i));
    nonce[cipher == Cipher::kAes256Gcm ? nonce.size() - 1 - i : 4 + i] = byte;
  }
  return nonce;
}

std::string_view bytesOf(const RecordHeader& header) {
  return {reinterpret_cast<const char*>(&header.bits), sizeof(header.bits)};
}

}  // namespace

std::string_view nameOf(Cipher cipher) { return cipher == Cipher::kAes256Gcm ? "AES-256-GCM" : "ChaCha20-Poly1305"; }

bool hasAes() { return crypto_aead_aes256gcm_is_available() != 0; }

struct RecordCipher::AesState {
  std::optional<LibcryptoAes> libcrypto;  ///< used if this machine has libcrypto
  crypto_aead_aes256gcm_state state;      ///< of libsodium, used otherwise
  ~AesState() { sodium_memzero(&state, sizeof(state)); }
};

const Libcrypto* RecordCipher::findLibcrypto() { return Libcrypto::find(); }

RecordCipher::RecordCipher(Cipher cipher, const SecretKey& key, uint64_t records_per_key, const Libcrypto* libcrypto)
    : cipher_(cipher), records_per_key_(records_per_key), key_(key) {
  if (cipher == Cipher::kAes256Gcm) {
    aes_ = std::make_unique<AesState>();
    if (libcrypto != nullptr) aes_->libcrypto.emplace(*libcrypto);
  }
  useKey();
}

RecordCipher::~RecordCipher() = default;

void RecordCipher::useKey() {
  if (!aes_) return;
  if (aes_->libcrypto) {
    aes_->libcrypto->setKey(key_);
  } else {
    crypto_aead_aes256gcm_beforenm(&aes_->state, key_.data());
  }
}

bool RecordCipher::hasFailed() const { return aes_ && aes_->libcrypto && aes_->libcrypto->hasFailed(); }

bool RecordCipher::rekeyIfDue() {
  if (number_ == 0 || number_ % records_per_key_ != 0) return true;
  // Noise's REKEY: the next key is the ciphertext of zeros, as the message with the greatest number, which no record
  // has.
  const std::array<char, kKeyBytes> zeros{};
  std::array<char, kKeyBytes + kTagBytes> sealed{};
  if (!encrypt(~uint64_t{0}, {}, zeros, sealed.data())) return false;
  key_ = SecretKey({sealed.data(), kKeyBytes});
  sodium_memzero(sealed.data(), sealed.size());
  useKey();
  return true;
}

bool RecordCipher::encrypt(uint64_t number, std::string_view associated, std::span<const char> plain, char* out) {
  const auto nonce = recordNonce(cipher_, number);
  if (aes_ && aes_->libcrypto) return aes_->libcrypto->seal(nonce, associated, plain, out);
  if (aes_) {
    crypto_aead_aes256gcm_encrypt_afternm(
        asUnsigned(out), nullptr, asUnsigned(plain.data()), plain.size(), asUnsigned(associated.data()),
        associated.size(), nullptr, nonce.data(), &aes_->state);
  } else {
    crypto_aead_chacha20poly1305_ietf_encrypt(
        asUnsigned(out), nullptr, asUnsigned(plain.data()), plain.size(), asUnsigned(associated.data()),
        associated.size(), nullptr, nonce.data(), key_.data());
  }
  return true;  // the functions of libsodium cannot fail
}

bool RecordCipher::seal(RecordHeader header, std::span<const char> plain, char* out) {
  return rekeyIfDue() && encrypt(number_++, bytesOf(header), plain, out);
}

bool RecordCipher::open(RecordHeader header, std::span<const char> sealed, char* out) {
  if (!rekeyIfDue()) return false;
  const auto nonce = recordNonce(cipher_, number_++);
  const auto associated = bytesOf(header);
  if (aes_ && aes_->libcrypto) return aes_->libcrypto->open(nonce, associated, sealed, out);
  if (aes_) {
    return crypto_aead_aes256gcm_decrypt_afternm(
               asUnsigned(out), nullptr, nullptr, asUnsigned(sealed.data()), sealed.size(),
               asUnsigned(associated.data()), associated.size(), nonce.data(), &aes_->state) == 0;
  }
  return crypto_aead_chacha20poly1305_ietf_decrypt(
             asUnsigned(out), nullptr, nullptr, asUnsigned(sealed.data()), sealed.size(), asUnsigned(associated.data()),
             associated.size(), nonce.data(), key_.data()) == 0;
}

}  // namespace torchrpc::native
