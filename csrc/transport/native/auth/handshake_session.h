#pragma once

// One socket from its creation until the peer is authenticated: connecting, the handshake and its deadline. Needs a few
// hundred bytes and one handshake message of memory.
// Threads: the loop thread only.

#include <functional>
#include <memory>
#include <string>

#include "base/result.h"
#include "transport/native/auth/handshake_message.h"
#include "transport/native/shared_state.h"
#include "transport/native/socket/socket.h"

namespace torchrpc::native {

class HandshakeSession {
 public:
  /// The result of a successful handshake.
  struct AuthenticatedPeer {
    Descriptor socket;
    HandshakeMessage peer;  ///< its HELLO or WELCOME
    Descriptor memory;      ///< shared by the two sides; invalid if they share none
  };
  /// Called exactly once, as the last step of a callback of the loop: it may destroy the session. Errors: kWorkerLost,
  /// kProtocol.
  using Done = std::function<void(Result<AuthenticatedPeer>)>;
  /// Makes the memory that the two sides will share; returns an invalid descriptor if that fails.
  using MemoryFactory = std::function<Descriptor()>;

  /// For the listener. `self`: the listener, group and flags that a HELLO is compared with, and the name of this node.
  HandshakeSession(
      SharedState& shared, Descriptor accepted, HandshakeMessage self, MemoryFactory make_memory, Done done);
  /// For the opener, which connects and sends `hello`.
  HandshakeSession(SharedState& shared, SocketAddress address, HandshakeMessage hello, Done done);

  // All functions that return bool return whether the handshake continues. If not, they have called `done`.
  /// Fails unless the handshake is complete after `timeout`.
  bool start(Duration timeout);

  /// Opener, in `done` with an error: whether a later attempt may succeed, because the peer answered nothing wrong. It
  /// was busy or stopped, it closed the connection to make room, the network was down, or this process lacked a
  /// descriptor or memory.
  bool mayRetry() const { return may_retry_; }
  /// Listener: whether the peer has sent a HELLO that names this listener and this group, as only a reader of the
  /// store can.
  bool hasGreeted() const { return has_greeted_; }

 private:
  bool connect();
  bool onConnected();
  bool onReady();
  bool onMessage(const HandshakeMessage& message);
  bool receiveChallenge(const HandshakeMessage& challenge);
  bool receiveWelcome(const HandshakeMessage& welcome);
  bool receiveHello(const HandshakeMessage& hello);
  bool receiveAnswer(const HandshakeMessage& answer);
  bool sendWelcome();
  /// Sends the message and adds it to the transcript.
  bool sendMessage(const HandshakeMessage& message, int descriptor = -1);
  bool fail(ErrorCode code, const std::string& text);
  /// For an error of a system call.
  bool failWith(int error);
  bool failForNow(const std::string& text);
  bool succeed(const HandshakeMessage& peer);

  /// Returns false while the message is incomplete. Reads no byte beyond it: the bytes after WELCOME are frames.
  bool readMessage();
  bool hasSecret() const { return !shared_.secret.empty(); }
  /// The error text if only one of two workers has a secret.
  static std::string secretMismatchText(const std::string& worker_with, const std::string& worker_without);

  SharedState& shared_;
  const bool opener_;
  const SocketAddress address_;
  const HandshakeMessage self_;
  const MemoryFactory make_memory_;
  Done done_;
  Descriptor socket_, memory_;
  EventLoop::Watch watch_, retry_, deadline_;
  bool connected_;
  bool challenged_ = false;  ///< a CHALLENGE has been sent or received
  bool has_greeted_ = false;
  bool may_retry_ = false;
  HandshakeMessage hello_;  ///< listener: the HELLO that it received
  std::string transcript_;  ///< the bytes of all messages of both sides until now; only if there is a secret
  std::string received_;    ///< of the message that is being read
  size_t wanted_bytes_ = kHandshakePrefixBytes;
  HandshakePrefix prefix_;
};

}  // namespace torchrpc::native
