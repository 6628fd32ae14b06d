#pragma once

// Handshake messages, which the two sides of a connection exchange before the first frame, and their bytes. PROTOCOL.md
// specifies them. The functions here never allocate more than the few KiB of one message, even for malformed bytes.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace torchrpc::native {

/// The version of the protocol, sent in the first bytes of a message. Their layout is the same in every version.
constexpr uint16_t kVersion = 9;
constexpr size_t kHandshakePrefixBytes = 16;
constexpr size_t kMaxHandshakeBodyBytes = 6144;
constexpr size_t kMaxIdentityBytes = 2048;

// Types 2 and 3 belonged to earlier versions.
enum class HandshakeType : uint16_t {
  kHello = 1,    ///< opener: the first message
  kWelcome = 4,  ///< listener: answers HELLO
  kRefusal = 5,  ///< listener: the reason why it closes the connection
  kConfirm = 6,  ///< opener: answers WELCOME, and proves that its HELLO was not a replay
  kReady = 7,    ///< listener: the handshake is complete, frames may follow
};

/// The part of a message that the group's secret, if there is one, protects. Each type of message uses some of the
/// fields.
struct HandshakePayload {
  uint16_t flags = 0;        ///< welcome, ready: the features that the connection uses
  std::string name{};        ///< hello, welcome: the name of the node
  std::string encryption{};  ///< hello, welcome: the node's setting of encryption, for error texts
  std::string identity{};    ///< welcome, confirm: the proof of the name (Identity::prove)

  std::string bytes() const;
  /// Throws Error(kProtocol) for malformed bytes.
  static HandshakePayload parse(std::string_view bytes);
};

/// The fields of all types of messages; each type has some of them.
struct HandshakeMessage {
  HandshakeType type = HandshakeType::kHello;
  uint16_t flags = 0;     ///< hello: the features that the opener offers
  uint64_t listener = 0;  ///< hello: the id in the address of the worker that the opener connects to
  std::string group{};    ///< hello: opaque; both sides must have the same
  std::string payload{};  ///< hello, welcome, confirm, ready: HandshakePayload's bytes; in groups with a secret, sealed
  std::string text{};     ///< refusal: the reason

  // Flags.
  static constexpr uint16_t kSharedMemory = 1;  ///< rings in shared memory beside the socket
  static constexpr uint16_t kSecret = 2;        ///< hello: the group has a secret
  static constexpr uint16_t kEncrypted = 4;     ///< frames are encrypted
  static constexpr uint16_t kAes = 8;           ///< the cipher is AES-256-GCM
  static constexpr uint16_t kAllFlags = 15;

  std::string bytes() const;
};

/// The first bytes of every message.
struct HandshakePrefix {
  HandshakeType type{};
  uint16_t body_bytes = 0;

  /// Whether the bytes begin a message of this protocol, in any version.
  static bool isOurs(std::string_view bytes);
  /// Throws Error(kProtocol) for malformed bytes, and for another version of the protocol.
  static HandshakePrefix parse(std::string_view bytes);
};

/// Throws Error(kProtocol) for a malformed body.
HandshakeMessage parseHandshake(HandshakeType type, std::string_view body);

}  // namespace torchrpc::native
