#pragma once

// What the two sides of a connection say to each other before the first frame: the bytes. PROTOCOL.md specifies them.
// Nothing here allocates more than a message's few KiB, whatever the bytes are.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace torchrpc::native {

/// Of which version a peer is shows in its first bytes, which no version changes.
constexpr uint16_t kVersion = 5;
constexpr size_t kHandshakePrefixBytes = 16;
constexpr size_t kMaxHandshakeBodyBytes = 4096;  ///< at most

enum class HandshakeType : uint16_t {
  kHello = 1,      ///< the opener's first
  kChallenge = 2,  ///< prove that you know the secret of the group; only where there is one
  kAnswer = 3,     ///< to a challenge
  kWelcome = 4,    ///< frames may follow
  kRefusal = 5,    ///< the last word
};

/// All that the messages of a handshake can say; each type has its own part of it.
struct HandshakeMessage {
  HandshakeType type = HandshakeType::kHello;
  uint16_t flags = 0;     ///< hello: what the opener can do; welcome: what of it is done
  uint64_t listener = 0;  ///< hello: whom the opener wants, as the address says
  std::string group{};    ///< hello: opaque; both sides must have the same
  std::string name{};     ///< hello, challenge, welcome: the node's, for messages to people
  std::string nonce{};    ///< hello, challenge: made by chance for this connection; empty where there is no secret
  std::string proof{};    ///< answer, welcome: of the secret, over all that has been said; empty where there is none
  std::string text{};     ///< refusal: why

  static constexpr uint16_t kSharedMemory = 1;  ///< flag: rings beside the socket

  std::string bytes() const;
};

/// A message's fixed beginning. Throws Error(kProtocol), as parseHandshake does.
struct HandshakePrefix {
  HandshakeType type{};
  uint16_t body_bytes = 0;

  /// Of whichever version.
  static bool isOurs(std::string_view bytes);
  static HandshakePrefix parse(std::string_view bytes);
};

HandshakeMessage parseHandshake(HandshakeType type, std::string_view body);

}  // namespace torchrpc::native
