#pragma once

// The interface of all transports: native, TensorPipe, UCX and, for tests, loopback (within a process) and the faulty
// decorator. One test suite (tests/cpp/transport/transport_contract_test.cpp) runs on all of them.
//
// Note [Threads of handlers]
// The transport calls handlers, acceptors and completions "on the loop": on its own thread or, to save a thread switch,
// on an application thread that is inside a function of this interface at that moment. For example, the thread that
// calls poll() runs onFrame for frames that have arrived, and the thread that calls send() may run completions and,
// over TensorPipe, handlers. inLoop() is true on that thread during the callback.
// The transport guarantees:
// - No two threads call the handler of one connection at the same time. Handlers of different connections may run at
//   the same time, and a completion may run at any time, even while the handler of its connection runs.
// - A callback may call any function of this interface except close(), poll() and park() of its own transport. During a
//   callback the transport holds no lock that the permitted functions acquire.
// The application guarantees:
// - Callbacks do not block and do not throw.
// - A thread that calls a function of this interface holds no lock that a callback acquires.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/result.h"
#include "base/sync/futex_waiter.h"
#include "base/timer.h"
#include "base/unique_function.h"
#include "transport/peer_identity.h"
#include "wire/message.h"

namespace torchrpc {

/// Called when a frame has been sent, or could not be.
using SentHandler = UniqueFunction<void(Status)>;

/// A connection to one peer; both sides send and receive.
class Connection {
 public:
  virtual ~Connection() = default;

  /// Queues a frame and returns at once. Frames of one connection arrive in the order of the calls. `done` is called
  /// exactly once, perhaps before send() returns. Without an error, the transport no longer needs the frame's memory;
  /// the frame has not necessarily arrived. Memory whose deleter may run foreign code is freed off the loop, perhaps
  /// after `done` (see Disposal). With an error, the frame may not have arrived: kWorkerLost, kShutdown, or
  /// kFrameTooLarge, after which the connection remains usable. Thread-safe.
  virtual void send(Frame&& frame, SentHandler&& done) = 0;

  /// Closes the connection; queued frames fail. The handler is notified once, on the loop. Thread-safe, idempotent.
  /// Destroying the last reference does not close a connection: it lives until either side closes it or its transport.
  virtual void close() = 0;

  /// Returns a counter that changes while the peer makes progress with a frame: when it sends bytes, or frees room for
  /// the bytes of this side. Always 0 for a transport that moves only whole frames. Thread-safe.
  virtual uint64_t progress() const { return 0; }

  /// Why the connection is not open yet, as text for humans: the peer has not answered, or the last attempt has failed
  /// for that reason and will be repeated. Empty if the connection is open or has ended, and for a transport that
  /// cannot tell. Thread-safe.
  virtual std::string whyNotOpen() const { return {}; }

  /// Returns the transport and the addresses as text for humans.
  virtual std::string describe() const = 0;
};

/// Smaller frames are not announced to their handler. See ConnectionHandler::onAnnounced().
constexpr uint64_t kMinAnnouncedBytes = 64 << 10;

/// Receives the events of one connection.
class ConnectionHandler {
 public:
  virtual ~ConnectionHandler() = default;
  /// The peer has proved its identity. Called before the first frame, and only if the workers of the group have
  /// identities.
  virtual void onIdentity(const PeerIdentity& identity) { static_cast<void>(identity); }
  /// The peer, which has opened the connection, has said its name in the handshake, and need not prove it because the
  /// workers of the group have no identities. Called before the first frame. Not called by a transport without
  /// handshakes.
  virtual void onClaimedName(const std::string& name) { static_cast<void>(name); }
  /// A frame of at least kMinAnnouncedBytes has announced its sizes, `bytes` together, and its head begins with
  /// `head_begin`, which suffices for peekFrame(). The transport has not allocated memory for the rest. With an error,
  /// the transport drops the rest as it arrives, and delivers the frame with `head_begin` alone and the error as its
  /// Frame::failure. No other frame is delivered in between. Not called by a transport that announces no sizes.
  virtual Status onAnnounced(std::string_view head_begin, uint64_t bytes) {
    static_cast<void>(head_begin), static_cast<void>(bytes);
    return std::nullopt;
  }
  /// A whole frame has arrived. Not called after onClosed.
  virtual void onFrame(Frame&& frame) = 0;
  /// The connection is closed. Called exactly once, as the last callback, whichever side closed it. `reason` has the
  /// code kWorkerLost (peer or network), kShutdown (closed on this side), kProtocol or kFrameTooLarge.
  virtual void onClosed(const Error& reason) = 0;
};

class Transport {
 public:
  /// Called on the loop for every connection that a peer opens. Returns the handler, or nullptr to refuse the
  /// connection.
  using Acceptor = std::function<std::shared_ptr<ConnectionHandler>(std::shared_ptr<Connection>)>;

  /// Calls close().
  virtual ~Transport() = default;

  /// Starts to accept connections; called once. Returns the address for peers: opaque text of at most 4 KiB.
  /// Throws Error(kRendezvous) naming the address if it cannot listen there.
  virtual std::string listen(Acceptor acceptor) = 0;

  /// Calls `observer` on the loop for each peer whose handshake this side refuses, with the name that the peer claims,
  /// or an empty one. To be called before listen(). A transport without handshakes ignores it.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): overrides keep it.
  virtual void onRefused(std::function<void(const std::string& peer, const Error& reason)> /*observer*/) {}

  /// Opens a connection to an address that listen() of the same kind of transport returned. Returns at once, and the
  /// caller can send frames at once. If no worker listens there, onClosed reports that, perhaps before connect()
  /// returns. Throws Error(kInvalidArgument) for an address of another kind of transport, or if the address has no
  /// endpoint that this side can use, and Error(kShutdown) after close(). Thread-safe.
  virtual std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) = 0;

  /// Closes all connections (onClosed is called for each), stops listening and waits for the loop. Afterwards the
  /// transport makes no more callbacks, except the completion of a later send(), inside that send(). Must not be called
  /// on the loop. Idempotent.
  virtual void close() = 0;

  /// Whether the calling thread is inside a handler or completion of this transport, where it must not block.
  virtual bool inLoop() const = 0;

  /// For a thread that is about to wait for a message. May poll the active connections on the calling thread until
  /// `done()` is true or the spin budget is used up. Meanwhile that thread runs handlers. Not on the loop.
  virtual void poll(const std::function<bool()>& done) { static_cast<void>(done); }

  /// For a thread that has polled without result. May park it on the wait words of the connections, as the leader of
  /// the Leader/Followers pattern: a message wakes it, and it runs the handlers. Returns when `done()` is true (the
  /// thread that makes `done()` true must notify `waiter`), at the deadline, or when the thread should sleep elsewhere,
  /// perhaps at once, for example because another thread is parked with the same waiter. `preemptible`: another thread
  /// that parks here replaces this one. Not on the loop.
  virtual void park(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint deadline, bool preemptible) {
    static_cast<void>(done), static_cast<void>(waiter), static_cast<void>(deadline), static_cast<void>(preemptible);
  }

  /// Calls `done` once, on the loop, when the loop has read everything that arrived before this call; not after
  /// close(). A transport that cannot tell calls `done` at once, on the calling thread.
  virtual void afterReading(std::function<void()> done) {
    const auto at_once = std::move(done);
    at_once();
  }

  /// Returns text for debug output, e.g. "tensorpipe(shm,uv; cma,basic)".
  virtual std::string describe() const = 0;

  /// Returns counters for debug output as text, by name ("transport.<name>"). Thread-safe.
  virtual std::map<std::string, std::string> metrics() const { return {}; }
};

}  // namespace torchrpc
