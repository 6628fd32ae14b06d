#include "transport/native/auth/record_cipher.h"

#include <array>
#include <optional>
#include <sodium.h>

#include "transport/native/auth/aes_gcm.h"

namespace torchrpc::native {

static_assert(kKeyBytes == crypto_aead_aes256gcm_KEYBYTES && kTagBytes == crypto_aead_aes256gcm_ABYTES);
static_assert(crypto_aead_aes256gcm_NPUBBYTES == crypto_aead_chacha20poly1305_ietf_NPUBBYTES);

namespace {

/// Four zero bytes, then the number in the order of bytes that Noise has for the cipher.
std::array<unsigned char, crypto_aead_aes256gcm_NPUBBYTES> recordNonce(Cipher cipher, uint64_t number) {
  std::array<unsigned char, crypto_aead_aes256gcm_NPUBBYTES> nonce{};
  for (size_t i = 0; i < sizeof(number); ++i) {
    const auto byte = static_cast<unsigned char>(number >> (8 * i));
    nonce[cipher == Cipher::kAes256Gcm ? nonce.size() - 1 - i : 4 + i] = byte;
  }
  return nonce;
}

const unsigned char* asUnsigned(const char* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }
unsigned char* asUnsigned(char* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

std::string_view bytesOf(const RecordHeader& header) {
  return {reinterpret_cast<const char*>(&header.bits), sizeof(header.bits)};
}

}  // namespace

std::string_view nameOf(Cipher cipher) { return cipher == Cipher::kAes256Gcm ? "AES-256-GCM" : "ChaCha20-Poly1305"; }

bool hasAes() { return crypto_aead_aes256gcm_is_available() != 0; }

struct RecordCipher::AesState {
  std::optional<VectorAesGcm> vector;  ///< where the processor can, else
  crypto_aead_aes256gcm_state state;
  ~AesState() { sodium_memzero(&state, sizeof(state)); }
};

RecordCipher::RecordCipher(Cipher cipher, const SecretKey& key, uint64_t records_per_key)
    : cipher_(cipher), records_per_key_(records_per_key), key_(key) {
  if (cipher == Cipher::kAes256Gcm) aes_ = std::make_unique<AesState>();
  useKey();
}

RecordCipher::~RecordCipher() = default;

void RecordCipher::useKey() {
  if (!aes_) return;
  if (VectorAesGcm::isAvailable()) {
    aes_->vector.emplace(key_);
  } else {
    crypto_aead_aes256gcm_beforenm(&aes_->state, key_.data());
  }
}

void RecordCipher::rekeyIfDue() {
  if (number_ == 0 || number_ % records_per_key_ != 0) return;
  // Noise's REKEY: the ciphertext of zeros, as the message with the greatest number, which no record has.
  const std::array<char, kKeyBytes> zeros{};
  std::array<char, kKeyBytes + kTagBytes> sealed{};
  encrypt(~uint64_t{0}, {}, zeros, sealed.data());
  key_ = SecretKey({sealed.data(), kKeyBytes});
  sodium_memzero(sealed.data(), sealed.size());
  useKey();
}

void RecordCipher::encrypt(uint64_t number, std::string_view associated, std::span<const char> plain, char* out) const {
  const auto nonce = recordNonce(cipher_, number);
  if (aes_ && aes_->vector) {
    aes_->vector->seal(nonce, associated, plain, out);
  } else if (aes_) {
    crypto_aead_aes256gcm_encrypt_afternm(
        asUnsigned(out), nullptr, asUnsigned(plain.data()), plain.size(), asUnsigned(associated.data()),
        associated.size(), nullptr, nonce.data(), &aes_->state);
  } else {
    crypto_aead_chacha20poly1305_ietf_encrypt(
        asUnsigned(out), nullptr, asUnsigned(plain.data()), plain.size(), asUnsigned(associated.data()),
        associated.size(), nullptr, nonce.data(), key_.data());
  }
}

void RecordCipher::seal(RecordHeader header, std::span<const char> plain, char* out) {
  rekeyIfDue();
  encrypt(number_++, bytesOf(header), plain, out);
}

bool RecordCipher::open(RecordHeader header, std::span<const char> sealed, char* out) {
  rekeyIfDue();
  const auto nonce = recordNonce(cipher_, number_++);
  const auto associated = bytesOf(header);
  if (aes_ && aes_->vector) return aes_->vector->open(nonce, associated, sealed, out);
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
