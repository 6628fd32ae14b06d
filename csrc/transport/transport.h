#pragma once

// The contract every transport keeps: loopback (in process), TensorPipe, and decorators such as the faulty one.
// One suite of tests (tests/cpp/transport_contract_test.cpp) runs on all of them.
//
// Threads: a transport has one loop thread. Handlers and completions are called there and nowhere else, and never
// while a lock of the transport's is held, so they may call back into it. They must not block.

#include <functional>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/result.h"
#include "wire/message.h"

namespace torchrpc {

/// One way to one peer, both directions.
class Connection {
 public:
  virtual ~Connection() = default;

  /// Queues a frame; returns at once. Frames of one connection arrive in the order of the calls. `done` is called
  /// exactly once: without an error when the frame's memory is no longer needed (not: when it has arrived), with one
  /// (kWorkerLost, or kFrameTooLarge, which leaves the connection usable) when it will not be sent.
  /// Thread-safe.
  virtual void send(Frame frame, std::function<void(Status)> done) = 0;

  /// Ends the connection; what is queued fails. Handlers hear of it once, on the loop. Thread-safe, idempotent.
  virtual void close() = 0;

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
  /// Called for every connection a peer opens; returns who handles it.
  using Acceptor = std::function<std::shared_ptr<ConnectionHandler>(std::shared_ptr<Connection>)>;

  /// close().
  virtual ~Transport() = default;

  /// Starts accepting; called once. Returns the address to give to peers: opaque text, at most 4 KiB.
  /// Throws Error(kRendezvous) saying which address could not be listened on.
  virtual std::string listen(Acceptor acceptor) = 0;

  /// Opens a connection to an address that a listen() of the same kind of transport returned. Returns at once, frames
  /// can be sent at once; that nobody is there shows as onClosed. Throws Error(kInvalidArgument) for an address that
  /// is not of this transport's making. Thread-safe.
  virtual std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) = 0;

  /// Ends all connections (each handler hears onClosed), stops listening, waits for the loop thread. After it nothing
  /// is called any more. Must not be called from the loop. Idempotent.
  virtual void close() = 0;

  /// Whether the calling thread is the loop.
  virtual bool inLoop() const = 0;

  /// For debug output: e.g. "tensorpipe(shm,uv; cma,basic)".
  virtual std::string describe() const = 0;
};

}  // namespace torchrpc
