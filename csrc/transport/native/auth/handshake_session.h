#pragma once

// One socket from its creation until the peer is authenticated: connecting, the handshake and its deadline. Needs a few
// hundred bytes and one handshake message of memory.
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
  /// What both sides have to agree on. Their names, and whether they encrypt, are in the options (SharedState).
  struct Terms {
    uint64_t listener = 0;        ///< the id in the listener's address
    bool is_tcp = false;          ///< else a Unix socket
    bool shares_memory = false;   ///< this side can
    std::string expected_name{};  ///< opener: of the listener
  };
  /// The result of a successful handshake.
  struct AuthenticatedPeer {
    Descriptor socket;
    std::string name;
    Descriptor memory;                       ///< shared by the two sides; invalid if they share none
    std::optional<PeerIdentity> identity{};  ///< that it has proved; nothing if this worker has none itself
    std::optional<RecordKeys> keys{};        ///< if frames are sealed
    std::unique_ptr<TlsSession> tls{};       ///< if frames are encrypted by TLS
  };
  /// Called exactly once, as the last step of a callback of the loop: it may destroy the session. Errors: kWorkerLost,
  /// kProtocol.
  using Done = std::function<void(Result<AuthenticatedPeer>)>;
  /// Makes the memory that the two sides will share; returns an invalid descriptor if that fails.
  using MemoryFactory = std::function<Descriptor()>;
  /// The reason to refuse a worker of this name, which knows the secret; nothing if it is welcome.
  using Admission = std::function<std::optional<std::string>(const std::string& name)>;

  /// For the listener.
  HandshakeSession(
      SharedState& shared, Descriptor accepted, Terms terms, MemoryFactory make_memory, Admission admission, Done done);
  /// For the opener, which connects and sends HELLO.
  HandshakeSession(SharedState& shared, SocketAddress address, Terms terms, Done done);

  // All functions that return bool return whether the handshake continues. If not, they have called `done`.
  /// Fails unless the handshake is complete after `timeout`.
  bool start(Duration timeout);

  /// Opener, in `done` with an error: whether a later attempt may succeed, because the peer answered nothing wrong. It
  /// was busy or stopped, it closed the connection to make room, the network was down, or this process lacked a
  /// descriptor or memory.
  bool mayRetry() const { return may_retry_; }
  /// Listener: whether the peer has sent a HELLO that names this listener and this group and, if there is a secret,
  /// that was made by a peer that knows it.
  bool hasGreeted() const { return has_greeted_; }

 private:
  bool connect();
  bool onConnected();
  bool sendHello();
  bool onReady();
  void onDeadline();
  bool onMessage(const HandshakeMessage& message);
  /// TLS comes before all messages, if this worker has credentials for it. Returns whether messages can be exchanged.
  bool continueTls();
  // The listener.
  bool receiveHello(const HandshakeMessage& hello);
  bool sendWelcome(const HandshakeMessage& hello);
  bool receiveConfirm(const HandshakeMessage& confirm);
  // The opener.
  bool receiveWelcome(const HandshakeMessage& welcome);
  bool receiveReady(const HandshakeMessage& ready);

  /// Sends it with this payload, sealed if there is a secret. `tokens`: the message begins with those of Noise.
  bool sendMessage(HandshakeMessage message, const HandshakePayload& payload, std::string tokens, int descriptor = -1);
  /// The payload of the message whose tokens, if it has some, have been read. Throws Error(kProtocol).
  HandshakePayload openPayload(std::string_view sealed);
  /// Over TLS, if that is established. Returns 0 or errno.
  int send(const std::string& bytes, int descriptor = -1);
  /// As recv().
  ssize_t receiveSome(std::span<char> room, Descriptor* descriptor);
  /// Returns false while the message is incomplete. Reads no byte beyond it: the bytes after READY are frames.
  bool readMessage();
  bool fail(ErrorCode code, const std::string& text);
  /// For an error of a system call.
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
  std::unique_ptr<TlsSession> tls_;  ///< from the connection on
  bool connected_;
  bool has_greeted_ = false;      ///< opener: HELLO is sent
  bool peer_has_no_tls_ = false;  ///< though this worker has
  bool may_retry_ = false;
  std::optional<NoiseHandshake> noise_;  ///< if there is a secret, from HELLO on
  HandshakeType expected_;               ///< of the next message
  bool peer_shares_memory_ = false;
  std::string peer_name_;
  std::optional<PeerIdentity> identity_;  ///< of the peer
  uint16_t chosen_ = 0;                   ///< flags of WELCOME
  std::string received_;                  ///< of the message that is being read
  size_t wanted_bytes_ = kHandshakePrefixBytes;
  HandshakePrefix prefix_;
};

}  // namespace torchrpc::native
