#pragma once

// Handshake messages, which the two sides of a connection exchange before the first frame, and their bytes. PROTOCOL.md
// specifies them. The functions here allocate no more than the few KiB of one message, whatever the bytes are.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace torchrpc::native {

/// Of the protocol. It is part of a message's first bytes, whose layout is the same in every version.
constexpr uint16_t kVersion = 9;
constexpr size_t kHandshakePrefixBytes = 16;
constexpr size_t kMaxHandshakeBodyBytes = 6144;
constexpr size_t kMaxIdentityBytes = 2048;

// Types 2 and 3 belonged to earlier versions.
enum class HandshakeType : uint16_t {
  kHello = 1,    ///< opener: the first message
  kWelcome = 4,  ///< listener: answers HELLO
  kRefusal = 5,  ///< listener: the reason why it closes the connection
  kConfirm = 6,  ///< opener: answers WELCOME, and shows that its HELLO was no copy of an earlier one
  kReady = 7,    ///< listener: the handshake is complete, frames may follow
};

/// What a message says under the protection of the group's secret. Each type of message uses some of the fields.
struct HandshakePayload {
  uint16_t flags = 0;        ///< welcome, ready: the features that the connection uses
  std::string name{};        ///< hello, welcome: of the node
  std::string encryption{};  ///< hello, welcome: the setting of the node, for error texts
  std::string identity{};    ///< welcome, confirm: what proves the name

  std::string bytes() const;
  /// Throws Error(kProtocol).
  static HandshakePayload parse(std::string_view bytes);
};

/// The fields of all types of messages; each type has some of them.
struct HandshakeMessage {
  HandshakeType type = HandshakeType::kHello;
  uint16_t flags = 0;     ///< hello: the features that the opener offers
  uint64_t listener = 0;  ///< hello: the id in the address of the worker that the opener wants
  std::string group{};    ///< hello: opaque; both sides must have the same
  std::string payload{};  ///< hello, welcome, confirm, ready: HandshakePayload's bytes; in groups with a secret, sealed
  std::string text{};     ///< refusal: the reason

  // Flags.
  static constexpr uint16_t kSharedMemory = 1;  ///< rings beside the socket
  static constexpr uint16_t kSecret = 2;        ///< hello: the group has a secret
  static constexpr uint16_t kEncrypted = 4;     ///< frames are encrypted
  static constexpr uint16_t kAes = 8;           ///< with AES-256-GCM
  static constexpr uint16_t kAllFlags = 15;

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
