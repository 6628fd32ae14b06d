#pragma once

// One socket from its creation until the peer is authenticated: connecting, the handshake and its deadline. Uses a few
// hundred bytes of memory, and that of one handshake message.
// Threads: the loop thread only.

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "transport/native/auth/handshake_message.h"
#include "transport/native/auth/noise.h"
#include "transport/native/auth/record_cipher.h"
#include "transport/native/auth/tls_session.h"
#include "transport/native/shared_state.h"
#include "transport/native/socket/socket.h"
#include "transport/peer_identity.h"

namespace torchrpc::native {

class HandshakeSession {
 public:
  /// The terms of one connection. The node's name, and whether it encrypts, are in the options (SharedState).
  struct Terms {
    uint64_t listener = 0;        ///< the id in the listener's address
    bool is_tcp = false;          ///< else a Unix socket
    bool shares_memory = false;   ///< this side can share memory
    std::string expected_name{};  ///< opener: the name of the listener
  };
  /// The result of a successful handshake.
  struct AuthenticatedPeer {
    Descriptor socket;
    std::string name;
    Descriptor memory;                       ///< shared by the two sides; invalid if they share none
    std::optional<PeerIdentity> identity{};  ///< proved by the peer; unset without identities and TLS
    std::optional<RecordKeys> keys{};        ///< if frames are sealed
    std::unique_ptr<TlsSession> tls{};       ///< if frames are encrypted by TLS
  };
  /// Called exactly once, unless the session is destroyed before, as the last step of a callback of the loop: it may
  /// destroy the session. Errors: kWorkerLost, kProtocol; on the side of the listener kTimeout.
  using Done = std::function<void(Result<AuthenticatedPeer>)>;
  /// Makes the memory that the two sides will share; returns an invalid descriptor if that fails.
  using MemoryFactory = std::function<Descriptor()>;
  /// Returns the reason to refuse a worker of this name, or nothing if it is admitted. Called after the worker has
  /// shown that it knows the secret, if there is one.
  using Admission = std::function<std::optional<std::string>(const std::string& name)>;

  /// Makes the session of the listener, for an accepted socket.
  HandshakeSession(
      SharedState& shared, Descriptor accepted, Terms terms, MemoryFactory make_memory, Admission admission, Done done);
  /// Makes the session of the opener, which connects and sends HELLO.
  HandshakeSession(SharedState& shared, SocketAddress address, Terms terms, Done done);

  // Steps of the handshake that return bool return whether it continues, unless their comment differs. If it does not,
  // they have called `done`.
  /// Starts the handshake, which fails unless it is complete within `timeout`.
  bool start(Duration timeout);

  /// Opener, when `done` receives an error: whether a later attempt may succeed. It may if the peer was busy or
  /// stopped, or closed the connection to make room, if the network was down, or if this process lacked a descriptor or
  /// memory.
  bool mayRetry() const { return may_retry_; }
  /// Listener: whether the peer has sent a HELLO that names this listener and this group. If there is a secret, the
  /// HELLO must have been made by a peer that knows it, and be none of the latest copies: see SeenHellos.
  bool hasGreeted() const { return has_greeted_; }
  /// The name that the peer claims; empty: not received yet.
  const std::string& peerName() const { return peer_name_; }

 private:
  bool connect();
  bool onConnected();
  bool sendHello();
  bool onReady();
  void onDeadline();
  bool onMessage(const HandshakeMessage& message);
  /// Continues the TLS handshake, which comes before all messages if this worker has TLS credentials. Returns whether
  /// messages can be exchanged. Throws Error if TLS fails.
  bool continueTls();
  // On the side of the listener.
  bool receiveHello(const HandshakeMessage& hello);
  bool sendWelcome(const HandshakeMessage& hello);
  bool receiveConfirm(const HandshakeMessage& confirm);
  // On the side of the opener.
  bool receiveWelcome(const HandshakeMessage& welcome);
  bool receiveReady(const HandshakeMessage& ready);

  /// Sends the message with this payload, sealed if there is a secret. `tokens`: of Noise; they precede the payload.
  bool sendMessage(HandshakeMessage message, const HandshakePayload& payload, std::string tokens, int descriptor = -1);
  /// Opens and parses the payload of a message, after its tokens, if any, have been read. Throws Error(kProtocol).
  HandshakePayload openPayload(std::string_view sealed);
  /// Sends bytes, through TLS if there is a TLS session. Returns 0 or errno.
  int send(const std::string& bytes, int descriptor = -1);
  /// As recv(), through TLS if there is a TLS session. Throws Error if TLS fails.
  ssize_t receiveSome(std::span<char> room, Descriptor* descriptor);
  /// Reads the next message. Returns false while it is incomplete. Reads no byte beyond it, because the bytes after
  /// READY are frames. Throws Error.
  bool readMessage();
  bool fail(ErrorCode code, const std::string& text);
  /// Fails with the errno value of a system call; a later attempt may succeed after some of them.
  bool failWith(int error);
  bool failForNow(const std::string& text);
  bool succeed();

  bool hasSecret() const { return shared_.hasSecret(); }
  bool usesAes() const { return encrypts() && shared_.options.aes && hasAes(); }
  bool encrypts() const { return terms_.is_tcp && shared_.options.encrypt; }
  void startNoise(HandshakeMessage hello);
  void checkIdentity(const HandshakePayload& payload, std::string_view handshake_hash);
  std::string makeIdentity() const;
  Side peerSide() const { return side_ == Side::kOpener ? Side::kListener : Side::kOpener; }
  std::string encryptionMismatchText(bool peer_encrypts, const HandshakePayload& peer) const;

  SharedState& shared_;
  const Side side_;
  const SocketAddress address_;
  const Terms terms_;
  const MemoryFactory make_memory_;
  const Admission admission_;
  Done done_;
  Descriptor socket_, memory_;
  EventLoop::Watch watch_, retry_, deadline_;
  std::unique_ptr<TlsSession> tls_;  ///< from the start of the TLS handshake on
  bool connected_;
  bool has_greeted_ = false;      ///< opener: HELLO has been sent
  bool peer_has_no_tls_ = false;  ///< but this worker uses TLS
  bool may_retry_ = false;
  std::optional<NoiseHandshake> noise_;  ///< if there is a secret, from HELLO on
  HandshakeType expected_;               ///< the type of the next message
  bool peer_shares_memory_ = false;
  std::string peer_name_;
  std::optional<PeerIdentity> identity_;  ///< of the peer
  uint16_t chosen_ = 0;                   ///< flags of WELCOME
  std::string received_;                  ///< the bytes of the message that is being read
  size_t wanted_bytes_ = kHandshakePrefixBytes;
  HandshakePrefix prefix_;
};

}  // namespace torchrpc::native
