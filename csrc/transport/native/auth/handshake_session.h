#pragma once

// One socket until its peer has proved itself: connecting, the handshake, its deadline. Holds a few hundred bytes and
// what a greeting needs.
// Threads: the loop.

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
  /// A peer that is who it should be.
  struct AuthenticatedPeer {
    Descriptor socket;
    HandshakeMessage peer;
    Descriptor memory;  ///< that the two share, if they do
  };
  /// Called once, at the end of a callback of the loop's: may destroy the greeter. Errors: kWorkerLost, kProtocol.
  using Done = std::function<void(Result<AuthenticatedPeer>)>;
  /// Makes what the two sides are going to share; invalid if they cannot.
  using MemoryMaker = std::function<Descriptor()>;

  /// For the side that listens: `self` is what a HELLO must match, and the name to give.
  HandshakeSession(SharedState& shared, Descriptor accepted, HandshakeMessage self, MemoryMaker make_memory, Done done);
  /// For the side that opens: connects and says `hello`.
  HandshakeSession(SharedState& shared, SocketAddress address, HandshakeMessage hello, Done done);

  // Those that give a bool tell whether the handshake goes on; if not, `done` has been called.
  bool start(Duration deadline);

 private:
  bool connect();
  bool onConnected();
  bool onReady();
  /// A whole message.
  bool onMessage(const HandshakeMessage& greeting);
  bool receiveChallenge(const HandshakeMessage& challenge);
  bool receiveWelcome(const HandshakeMessage& welcome);
  bool receiveHello(const HandshakeMessage& hello);
  bool receiveAnswer(const HandshakeMessage& answer);
  bool welcome();
  /// Sends, and puts it among what has been said.
  bool say(const HandshakeMessage& greeting, int descriptor = -1);
  bool fail(ErrorCode code, const std::string& text);
  bool succeed(const HandshakeMessage& peer);

  /// Reads no further than the greeting: what follows is not ours. False: it is not whole yet.
  bool readMessage();
  bool hasSecret() const { return !shared_.secret.empty(); }
  /// Of a side that has (not) got a secret, where the other has not (has).
  static std::string unlikeSecrets(const std::string& with, const std::string& without);

  SharedState& shared_;
  const bool opener_;
  const SocketAddress address_;
  const HandshakeMessage self_;
  const MemoryMaker make_memory_;
  Done done_;
  Descriptor socket_, memory_;
  EventLoop::Watch watch_, retry_, deadline_;
  bool connected_;
  bool challenged_ = false;  ///< the challenge has been sent, or has come
  HandshakeMessage hello_;   ///< the listener: what the opener began with
  std::string transcript_;   ///< all greetings of both sides up to now; kept where there is a secret
  std::string bytes_;
  size_t wanted_ = kHandshakePrefixBytes;
  HandshakePrefix prefix_;
};

}  // namespace torchrpc::native
