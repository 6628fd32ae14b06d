#pragma once

// Handshake messages, which the two sides of a connection exchange before the first frame, and their bytes. PROTOCOL.md
// specifies them. The functions here allocate no more than the few KiB of one message, whatever the bytes are.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace torchrpc::native {

/// Of the protocol. It is part of a message's first bytes, whose layout is the same in every version.
constexpr uint16_t kVersion = 7;
constexpr size_t kHandshakePrefixBytes = 16;
constexpr size_t kMaxHandshakeBodyBytes = 4096;

enum class HandshakeType : uint16_t {
  kHello = 1,      ///< opener: the first message
  kChallenge = 2,  ///< listener: asks for proof of the group's secret; only in groups with a secret
  kAnswer = 3,     ///< opener: the proof
  kWelcome = 4,    ///< listener: the handshake is complete, frames may follow
  kRefusal = 5,    ///< listener: the reason why it closes the connection
};

/// The fields of all types of messages; each type has some of them.
struct HandshakeMessage {
  HandshakeType type = HandshakeType::kHello;
  uint16_t flags = 0;     ///< hello: features that the opener offers; welcome: those that the connection uses
  uint64_t listener = 0;  ///< hello: the id in the address of the worker that the opener wants
  std::string group{};    ///< hello: opaque; both sides must have the same
  std::string name{};     ///< hello, challenge, welcome: of the node, for error texts
  std::string nonce{};    ///< hello, challenge: random, for this connection only; empty in groups without a secret
  std::string proof{};    ///< answer, welcome: that the sender knows the secret; empty in groups without a secret
  std::string text{};     ///< refusal: the reason

  static constexpr uint16_t kSharedMemory = 1;  ///< flag: rings beside the socket

  std::string bytes() const;
};

/// The first bytes of every message.
struct HandshakePrefix {
  HandshakeType type{};
  uint16_t body_bytes = 0;

  /// Whether the bytes begin a message of this protocol, in any version.
  static bool isOurs(std::string_view bytes);
  /// Throws Error(kProtocol).
  static HandshakePrefix parse(std::string_view bytes);
};

/// Throws Error(kProtocol).
HandshakeMessage parseHandshake(HandshakeType type, std::string_view body);

}  // namespace torchrpc::native
