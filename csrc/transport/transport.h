#pragma once

// The contract every transport keeps: loopback (in process), TensorPipe, native, and decorators such as the faulty one.
// One suite of tests (tests/cpp/transport/transport_contract_test.cpp) runs on all of them.
//
// Threads: handlers and completions are called on the loop: one of the transport's own threads or, so that no message
// pays for a hand-over, a thread that is just then inside a call of this interface (a sender may find itself
// delivering a frame that arrived meanwhile). The handler of one connection is never called twice at once; completions
// come when they come, even while the handler is running, and so do calls of different connections. None is called
// while a lock of the transport's is held, so they may call back into it. They must not block and must not throw.
// Corollary: never call into a transport while holding a lock that a handler or a completion takes.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/result.h"
#include "base/sync/futex_waiter.h"
#include "base/timer.h"
#include "wire/message.h"

namespace torchrpc {

/// One way to one peer, both directions.
class Connection {
 public:
  virtual ~Connection() = default;

  /// Queues a frame; returns at once. Frames of one connection arrive in the order of the calls. `done` is called
  /// exactly once, perhaps before send() returns: without an error when the frame's memory is no longer needed (not:
  /// when it has arrived), with one when it will not be sent: kWorkerLost, kShutdown, or kFrameTooLarge, which leaves
  /// the connection usable. Thread-safe.
  virtual void send(Frame frame, std::function<void(Status)> done) = 0;

  /// Ends the connection; what is queued fails. Handlers hear of it once, on the loop. Thread-safe, idempotent.
  /// Dropping the last reference does not close: a connection lives until one side closes it or its transport.
  virtual void close() = 0;

  /// A number that changes while the peer shows that it takes part: bytes of it arrive, or it makes room for ours. What
  /// moves whole frames only, or at once, need not count. Thread-safe.
  virtual uint64_t progress() const { return 0; }

  /// For messages to people: transport, addresses.
  virtual std::string describe() const = 0;
};

/// The owner's side of a connection.
class ConnectionHandler {
 public:
  virtual ~ConnectionHandler() = default;
  /// A frame has arrived, whole. Not called after onClosed.
  virtual void onFrame(Frame frame) = 0;
  /// The connection has ended, for whatever reason, ours or the peer's: exactly once, the last call.
  /// `reason` has code kWorkerLost (peer or network), kShutdown (closed from this side), kProtocol or kFrameTooLarge.
  virtual void onClosed(const Error& reason) = 0;
};

class Transport {
 public:
  /// Called for every connection a peer opens, on the loop; returns who handles it, or nullptr to refuse it.
  using Acceptor = std::function<std::shared_ptr<ConnectionHandler>(std::shared_ptr<Connection>)>;

  /// close().
  virtual ~Transport() = default;

  /// Starts accepting; called once. Returns the address to give to peers: opaque text, at most 4 KiB.
  /// Throws Error(kRendezvous) saying which address could not be listened on.
  virtual std::string listen(Acceptor acceptor) = 0;

  /// Opens a connection to an address that a listen() of the same kind of transport returned. Returns at once, frames
  /// can be sent at once; that nobody is there shows as onClosed (the handler may be called before connect()
  /// returns). Throws Error(kInvalidArgument) for an address that is not of this transport's making, or that offers
  /// nothing this side can use, and Error(kShutdown) after close(). Thread-safe.
  virtual std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) = 0;

  /// Ends all connections (each handler hears onClosed), stops listening, waits for the loop. After it nothing is
  /// called any more but the completion of a send() that comes later, inside that call. Must not be called from the
  /// loop. Idempotent.
  virtual void close() = 0;

  /// Whether this thread is inside a handler or a completion of this transport: the place where nothing may block.
  virtual bool inLoop() const = 0;

  /// For a thread that is about to wait for a message: may carry messages in the loop's place, calling handlers, until
  /// `done` or until it is better to sleep. Not from the loop.
  virtual void poll(const std::function<bool()>& done) { static_cast<void>(done); }

  /// For a thread that has done so in vain and is about to sleep: may sleep where messages come in, and carry them when
  /// they come, until `done` (what makes it so rings the waiter), until `latest` or until it is better to sleep
  /// elsewhere. `preemptible`: to any other thread that comes. Not from the loop.
  virtual void sleep(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint latest, bool preemptible) {
    static_cast<void>(done), static_cast<void>(waiter), static_cast<void>(latest), static_cast<void>(preemptible);
  }

  /// For debug output: e.g. "tensorpipe(shm,uv; cma,basic)".
  virtual std::string describe() const = 0;

  /// Counters for debug output, "transport.<name>" to text. Thread-safe.
  virtual std::map<std::string, std::string> metrics() const { return {}; }
};

}  // namespace torchrpc
