#pragma once

// The Noise handshake NNpsk0 (Noise_NNpsk0_25519_ChaChaPoly_SHA256, revision 34 of the Noise specification), built from
// libsodium's primitives. The two sides agree on fresh keys. Only sides that know a common key can complete the
// handshake. The listener detects an opener that does not know the key before it computes any Diffie-Hellman:
//
//   opener -> listener: psk, e     writeTokens(), sealPayload()      readTokens(), openPayload()
//   listener -> opener: e, ee      readTokens(), openPayload()       writeTokens(), sealPayload()
//
// After these two messages, sealPayload() and openPayload() make and read Noise's transport messages.
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
  /// Without a key, returns `plain` unchanged.
  std::string seal(std::string_view associated, std::string_view plain);
  /// Returns nothing if these bytes were not sealed with this key, as this message, with this `associated`. Without a
  /// key, returns `sealed` unchanged.
  std::optional<std::string> open(std::string_view associated, std::string_view sealed);

 private:
  std::optional<SecretKey> key_;
  uint64_t number_ = 0;
};

class NoiseHandshake {
 public:
  static constexpr size_t kPublicKeyBytes = 32;

  /// `psk`: the key that both sides must know. `prologue`: bytes that must be the same on both sides. `ephemeral`: the
  /// private key of this side, for tests; by default a random one.
  NoiseHandshake(
      Side side, const SecretKey& psk, std::string_view prologue, std::optional<SecretKey> ephemeral = std::nullopt);

  /// Returns the first part of a message: the public key of this side.
  std::string writeTokens();
  std::string sealPayload(std::string_view payload);

  /// Removes the first part from the message. Throws Error(kProtocol) if it is too short, or no public key.
  void readTokens(std::string_view& message);
  /// Opens the rest of the message. Returns nothing if the peer does not know `psk` or has another prologue, or if the
  /// message was changed.
  std::optional<std::string> openPayload(std::string_view sealed);

  /// Identifies the handshake so far: only its two sides have the same hash. To be called between the two parts of a
  /// message, or after it.
  std::string_view hash() const { return hash_.view(); }
  /// Derives a key for another purpose, the same on both sides. To be called after both messages.
  SecretKey exportKey(std::string_view label) const { return hmac(chaining_key_.view(), {label}); }

 private:
  void mixHash(std::string_view bytes);
  void mixKey(std::string_view input);
  void mixKeyAndHash(std::string_view input);
  /// Mixes in the tokens of the current message: `public_key` (e) and, in the second message, the shared secret (ee).
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
  int messages_ = 0;  ///< the number of complete messages, up to two
};

}  // namespace torchrpc::native
