#include "transport/native/auth/noise.h"

#include <sodium.h>

#include "base/error.h"
#include "base/random.h"

namespace torchrpc::native {

static_assert(kKeyBytes == crypto_scalarmult_SCALARBYTES);
static_assert(kKeyBytes == crypto_aead_chacha20poly1305_ietf_KEYBYTES);
static_assert(kTagBytes == crypto_aead_chacha20poly1305_ietf_ABYTES);
static_assert(NoiseHandshake::kPublicKeyBytes == crypto_scalarmult_BYTES);

namespace {

constexpr std::string_view kProtocolName = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";
constexpr int kHandshakeMessages = 2;

SecretKey sha256(std::initializer_list<std::string_view> parts) {
  crypto_hash_sha256_state state;
  crypto_hash_sha256_init(&state);
  for (const auto part : parts) crypto_hash_sha256_update(&state, asUnsigned(part), part.size());
  SecretKey out;
  crypto_hash_sha256_final(&state, out.data());
  return out;
}

/// Noise's HKDF: the first three outputs.
struct Derived {
  SecretKey first, second, third;
};
Derived derive(const SecretKey& chaining_key, std::string_view input) {
  const auto extracted = hmac(chaining_key.view(), {input});
  Derived out;
  out.first = hmac(extracted.view(), {"\x01"});
  out.second = hmac(extracted.view(), {out.first.view(), "\x02"});
  out.third = hmac(extracted.view(), {out.second.view(), "\x03"});
  return out;
}

/// Four zero bytes, then the number, little-endian.
std::array<unsigned char, crypto_aead_chacha20poly1305_ietf_NPUBBYTES> nonceOf(uint64_t number) {
  std::array<unsigned char, crypto_aead_chacha20poly1305_ietf_NPUBBYTES> nonce{};
  for (size_t i = 0; i < sizeof(number); ++i) nonce[4 + i] = static_cast<unsigned char>(number >> (8 * i));
  return nonce;
}

}  // namespace

// ---- NoiseCipher ----

void NoiseCipher::setKey(const SecretKey& key) {
  key_ = key;
  number_ = 0;
}

std::string NoiseCipher::seal(std::string_view associated, std::string_view plain) {
  if (!key_) return std::string(plain);
  const auto nonce = nonceOf(number_++);
  std::string sealed(plain.size() + kTagBytes, '\0');
  crypto_aead_chacha20poly1305_ietf_encrypt(
      asUnsigned(sealed), nullptr, asUnsigned(plain), plain.size(), asUnsigned(associated), associated.size(), nullptr,
      nonce.data(), key_->data());
  return sealed;
}

std::optional<std::string> NoiseCipher::open(std::string_view associated, std::string_view sealed) {
  if (!key_) return std::string(sealed);
  if (sealed.size() < kTagBytes) return std::nullopt;
  const auto nonce = nonceOf(number_);
  std::string plain(sealed.size() - kTagBytes, '\0');
  const int failed = crypto_aead_chacha20poly1305_ietf_decrypt(
      asUnsigned(plain), nullptr, nullptr, asUnsigned(sealed), sealed.size(), asUnsigned(associated), associated.size(),
      nonce.data(), key_->data());
  if (failed != 0) return std::nullopt;
  ++number_;
  return plain;
}

// ---- NoiseHandshake ----

NoiseHandshake::NoiseHandshake(
    Side side, const SecretKey& psk, std::string_view prologue, std::optional<SecretKey> ephemeral)
    : side_(side), psk_(psk), ephemeral_(std::move(ephemeral)) {
  static_assert(kProtocolName.size() > kKeyBytes);  // the specification pads a shorter name instead
  hash_ = sha256({kProtocolName});
  chaining_key_ = hash_;
  mixHash(prologue);
}

void NoiseHandshake::mixHash(std::string_view bytes) { hash_ = sha256({hash_.view(), bytes}); }

void NoiseHandshake::mixKey(std::string_view input) {
  const auto derived = derive(chaining_key_, input);
  chaining_key_ = derived.first;
  cipher_.setKey(derived.second);
}

void NoiseHandshake::mixKeyAndHash(std::string_view input) {
  const auto derived = derive(chaining_key_, input);
  chaining_key_ = derived.first;
  mixHash(derived.second.view());
  cipher_.setKey(derived.third);
}

std::string NoiseHandshake::writeTokens() {
  if (messages_ == 0) mixKeyAndHash(psk_.view());
  if (!ephemeral_) ephemeral_ = SecretKey(secureRandomBytes(kKeyBytes));
  std::string public_key(kPublicKeyBytes, '\0');
  crypto_scalarmult_base(asUnsigned(public_key), ephemeral_->data());
  mixTokens(public_key);
  return public_key;
}

void NoiseHandshake::readTokens(std::string_view& message) {
  if (message.size() < kPublicKeyBytes) throw Error(ErrorCode::kProtocol, "a malformed handshake message");
  if (messages_ == 0) mixKeyAndHash(psk_.view());
  peer_ephemeral_ = message.substr(0, kPublicKeyBytes);
  message.remove_prefix(kPublicKeyBytes);
  mixTokens(peer_ephemeral_);
}

void NoiseHandshake::mixTokens(std::string_view public_key) {
  mixHash(public_key);
  mixKey(public_key);  // as for every e in a handshake with a psk
  if (messages_ == 1) mixSharedSecret();
}

void NoiseHandshake::mixSharedSecret() {
  SecretKey shared;
  if (crypto_scalarmult(shared.data(), ephemeral_->data(), asUnsigned(peer_ephemeral_)) != 0) {
    throw Error(ErrorCode::kProtocol, "a public key in its handshake that is none");
  }
  mixKey(shared.view());
}

std::string NoiseHandshake::sealPayload(std::string_view payload) {
  if (messages_ >= kHandshakeMessages) return send_.seal({}, payload);
  auto sealed = cipher_.seal(hash(), payload);
  mixHash(sealed);
  endMessage();
  return sealed;
}

std::optional<std::string> NoiseHandshake::openPayload(std::string_view sealed) {
  if (messages_ >= kHandshakeMessages) return receive_.open({}, sealed);
  auto payload = cipher_.open(hash(), sealed);
  if (!payload) return payload;
  mixHash(sealed);
  endMessage();
  return payload;
}

void NoiseHandshake::endMessage() {
  if (++messages_ < kHandshakeMessages) return;
  const auto derived = derive(chaining_key_, {});
  send_.setKey(side_ == Side::kOpener ? derived.first : derived.second);
  receive_.setKey(side_ == Side::kOpener ? derived.second : derived.first);
  ephemeral_.reset();
}

}  // namespace torchrpc::native
