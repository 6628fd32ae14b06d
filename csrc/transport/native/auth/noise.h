#pragma once

// The Noise handshake NNpsk0 (Noise_NNpsk0_25519_ChaChaPoly_SHA256, revision 34 of the Noise specification), out of
// libsodium's primitives. The two sides agree on fresh keys. Only those that know a common key can complete it, and the
// listener notices that the opener does not before it has done any Diffie-Hellman:
//
//   opener -> listener: psk, e     writeTokens(), sealPayload()      readTokens(), openPayload()
//   listener -> opener: e, ee      readTokens(), openPayload()       writeTokens(), sealPayload()
//
// After these two messages sealPayload() and openPayload() make and read Noise's transport messages.
// Threads: one at a time.

#include <optional>
#include <string>
#include <string_view>

#include "transport/native/auth/keys.h"

namespace torchrpc::native {

/// The side of a connection.
enum class Side : bool { kOpener, kListener };

/// A key and the number of the next message that it seals or opens.
class NoiseCipher {
 public:
  void setKey(const SecretKey& key);
  bool hasKey() const { return key_.has_value(); }
  /// Without a key: unchanged.
  std::string seal(std::string_view associated, std::string_view plain);
  /// Nothing if these bytes were not sealed with this key, as this message, with this `associated`.
  std::optional<std::string> open(std::string_view associated, std::string_view sealed);

 private:
  std::optional<SecretKey> key_;
  uint64_t number_ = 0;
};

class NoiseHandshake {
 public:
  static constexpr size_t kPublicKeyBytes = 32;

  /// `psk`: the key that both must know. `prologue`: what both must have seen. `ephemeral`: the private key of this
  /// side, for tests; else a random one.
  NoiseHandshake(
      Side side, const SecretKey& psk, std::string_view prologue, std::optional<SecretKey> ephemeral = std::nullopt);

  /// The first part of a message: the public key of this side.
  std::string writeTokens();
  std::string sealPayload(std::string_view payload);

  /// Takes the first part from the message. Throws Error(kProtocol) if it is too short, or no public key.
  void readTokens(std::string_view& message);
  /// Of the rest. Nothing if the peer does not know `psk`, has seen another prologue, or the message was changed.
  std::optional<std::string> openPayload(std::string_view sealed);

  /// Identifies the handshake until now: only its two sides have the same. Between the two parts of a message, and
  /// after it.
  std::string_view hash() const { return hash_.view(); }
  /// A key for another purpose; both sides get the same. After both messages.
  SecretKey exportKey(std::string_view label) const { return hmac(chaining_key_.view(), {label}); }

 private:
  void mixHash(std::string_view bytes);
  void mixKey(std::string_view input);
  void mixKeyAndHash(std::string_view input);
  /// The tokens of the current message but the public key that it begins with.
  void mixTokens(std::string_view public_key);
  void mixSharedSecret();
  void endMessage();

  const Side side_;
  SecretKey psk_;
  SecretKey chaining_key_, hash_;
  NoiseCipher cipher_;          ///< of the handshake
  NoiseCipher send_, receive_;  ///< of the messages after it
  std::optional<SecretKey> ephemeral_;
  std::string peer_ephemeral_;
  int messages_ = 0;  ///< that are complete
};

}  // namespace torchrpc::native
