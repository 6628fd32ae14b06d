#pragma once

// The contract of every transport: native, TensorPipe, UCX, and, for tests, loopback (within a process) and the faulty
// decorator. One suite of tests (tests/cpp/transport/transport_contract_test.cpp) runs on all of them.
//
// Note [Threads of handlers]
// Handlers, acceptors and completions are called "on the loop": on the transport's own thread or, which saves a switch
// of threads, on an application thread that is inside a function of this interface at that moment. For example, the
// thread that calls poll() runs onFrame for frames that have arrived, and the thread that calls send() may run
// completions and, over TensorPipe, handlers. inLoop() is true on that thread during the callback.
// The transport guarantees:
// - No two threads call the handler of one connection at the same time. Handlers of different connections may run at
//   the same time, and a completion may run at any time, even while the handler of its connection runs.
// - A callback may call any function of this interface except close(), poll() and park() of its own transport: the
//   transport holds no lock then that these functions take.
// In return:
// - Callbacks must not block and must not throw.
// - A thread must not hold a lock that a callback takes while it calls a function of this interface.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/result.h"
#include "base/sync/futex_waiter.h"
#include "base/timer.h"
#include "transport/peer_identity.h"
#include "wire/message.h"

namespace torchrpc {

/// A connection to one peer; both sides send and receive.
class Connection {
 public:
  virtual ~Connection() = default;

  /// Queues a frame and returns at once. Frames of one connection arrive in the order of the calls. `done` is called
  /// exactly once, perhaps before send() returns. Without an error: the transport no longer needs the frame's memory,
  /// which does not mean that the frame has arrived. References to memory that may run foreign code when it is freed
  /// are dropped where the loop does not wait for that, perhaps after `done` (see Disposal). With an error, the frame
  /// is not sent: kWorkerLost, kShutdown, or kFrameTooLarge, after which the connection remains usable. Thread-safe.
  virtual void send(Frame frame, std::function<void(Status)> done) = 0;

  /// Ends the connection; queued frames fail. The handler is notified once, on the loop. Thread-safe, idempotent.
  /// Destroying the last reference does not close: a connection lives until either side closes it or its transport.
  virtual void close() = 0;

  /// A number that changes while the peer takes part in the transfer of a frame: it sends bytes or it frees room for
  /// ours. A transport that moves only whole frames need not count. Thread-safe.
  virtual uint64_t progress() const { return 0; }

  /// Transport and addresses, for humans to read.
  virtual std::string describe() const = 0;
};

/// Receives the events of one connection.
class ConnectionHandler {
 public:
  virtual ~ConnectionHandler() = default;
  /// The peer has proved who it is. Called before the first frame, and only if the workers of the group have
  /// identities.
  virtual void onIdentity(const PeerIdentity& identity) { static_cast<void>(identity); }
  /// A whole frame has arrived. Not called after onClosed.
  virtual void onFrame(Frame frame) = 0;
  /// The connection has ended. Called exactly once, and last, whichever side ended it. `reason` has the code
  /// kWorkerLost (peer or network), kShutdown (closed on this side), kProtocol or kFrameTooLarge.
  virtual void onClosed(const Error& reason) = 0;
};

class Transport {
 public:
  /// Called on the loop for every connection that a peer opens. Returns its handler, or nullptr to refuse it.
  using Acceptor = std::function<std::shared_ptr<ConnectionHandler>(std::shared_ptr<Connection>)>;

  /// Calls close().
  virtual ~Transport() = default;

  /// Starts to accept connections; called once. Returns the address for peers: opaque text of at most 4 KiB.
  /// Throws Error(kRendezvous) naming the address on which it could not listen.
  virtual std::string listen(Acceptor acceptor) = 0;

  /// Opens a connection to an address that listen() of the same kind of transport returned. Returns at once, and frames
  /// can be sent at once. If no worker listens there, onClosed reports that, perhaps before connect() returns. Throws
  /// Error(kInvalidArgument) for an address of another kind of transport or one that offers nothing that this side can
  /// use, and Error(kShutdown) after close(). Thread-safe.
  virtual std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) = 0;

  /// Ends all connections (onClosed is called for each), stops listening and waits for the loop. Afterwards the
  /// transport calls nothing any more, except the completion of a later send(), inside that send(). Must not be called
  /// on the loop. Idempotent.
  virtual void close() = 0;

  /// Whether the calling thread is inside a handler or completion of this transport, where it must not block.
  virtual bool inLoop() const = 0;

  /// For a thread that is about to wait for a message. May poll the active connections on the calling thread, which
  /// then runs handlers, until `done()` is true or the spin budget is used up. Not on the loop.
  virtual void poll(const std::function<bool()>& done) { static_cast<void>(done); }

  /// For a thread that has polled without result. May park it where messages arrive, as the leader of the
  /// Leader/Followers pattern: a message wakes it, and it runs the handlers. Returns when `done()` is true (the thread
  /// that makes it so must wake `waiter`), at the deadline, or when the thread should rather sleep elsewhere, which may
  /// be at once. `preemptible`: another thread that parks here replaces this one. Not on the loop.
  virtual void park(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint deadline, bool preemptible) {
    static_cast<void>(done), static_cast<void>(waiter), static_cast<void>(deadline), static_cast<void>(preemptible);
  }

  /// Calls `done` once, on the loop, when the loop has read all that had arrived by now. A transport that cannot tell
  /// calls it at once. Not called after close().
  virtual void afterReading(std::function<void()> done) {
    const auto at_once = std::move(done);
    at_once();
  }

  /// For debug output: e.g. "tensorpipe(shm,uv; cma,basic)".
  virtual std::string describe() const = 0;

  /// Counters for debug output, "transport.<name>" to text. Thread-safe.
  virtual std::map<std::string, std::string> metrics() const { return {}; }
};

}  // namespace torchrpc
