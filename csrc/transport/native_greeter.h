#pragma once

// One socket until its peer has proved itself: connecting, the handshake, its deadline. Holds a few hundred bytes and
// what a greeting needs. Internal to native_*.cpp.
// Threads: the loop.

#include <functional>
#include <memory>
#include <string>

#include "base/result.h"
#include "transport/native_handshake.h"
#include "transport/native_shared.h"
#include "transport/native_socket.h"

namespace torchrpc {

class NativeGreeter {
 public:
  /// A peer that is who it should be.
  struct Met {
    Descriptor socket;
    Greeting peer;
    Descriptor memory;  ///< that the two share, if they do
  };
  /// Called once, at the end of a callback of the loop's: may destroy the greeter. Errors: kWorkerLost, kProtocol.
  using Done = std::function<void(Result<Met>)>;
  /// Makes what the two sides are going to share; invalid if they cannot.
  using MemoryMaker = std::function<Descriptor()>;

  /// For the side that listens: `self` is what a HELLO must match, and the name to give.
  NativeGreeter(NativeShared& shared, Descriptor accepted, Greeting self, MemoryMaker make_memory, Done done);
  /// For the side that opens: connects and says `hello`.
  NativeGreeter(NativeShared& shared, SocketAddress address, Greeting hello, Done done);

  // Those that give a bool tell whether the handshake goes on; if not, `done` has been called.
  bool start(Duration deadline);

 private:
  bool connect();
  bool onConnected();
  bool onReady();
  /// A whole message.
  bool onGreeting(const Greeting& greeting);
  bool receiveChallenge(const Greeting& challenge);
  bool receiveWelcome(const Greeting& welcome);
  bool receiveHello(const Greeting& hello);
  bool receiveAnswer(const Greeting& answer);
  bool welcome();
  /// Sends, and puts it among what has been said.
  bool say(const Greeting& greeting, int descriptor = -1);
  bool fail(ErrorCode code, const std::string& text);
  bool succeed(const Greeting& peer);

  /// Reads no further than the greeting: what follows is not ours. False: it is not whole yet.
  bool readGreeting();
  bool hasSecret() const { return !shared_.secret.empty(); }
  /// Of a side that has (not) got a secret, where the other has not (has).
  static std::string unlikeSecrets(const std::string& with, const std::string& without);

  NativeShared& shared_;
  const bool opener_;
  const SocketAddress address_;
  const Greeting self_;
  const MemoryMaker make_memory_;
  Done done_;
  Descriptor socket_, memory_;
  NativeLoop::Watch watch_, retry_, deadline_;
  bool connected_;
  bool challenged_ = false;  ///< the challenge has been sent, or has come
  Greeting hello_;           ///< the listener: what the opener began with
  std::string transcript_;   ///< all greetings of both sides up to now; kept where there is a secret
  std::string bytes_;
  size_t wanted_ = kGreetingPrefixBytes;
  GreetingPrefix prefix_;
};

}  // namespace torchrpc
