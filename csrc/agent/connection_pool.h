#pragma once

// The connections of a node, at most one chosen per peer, opened with the first message to it. A connection begins
// with HELLO in the opener's direction; from then on both sides send over it.
// Threads: link() and send() from any; the rest on the transport's loop.

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "agent/worker_directory.h"
#include "base/mutex.h"
#include "transport/transport.h"

namespace torchrpc {

class ConnectionPool;

/// A connection and the worker at its other end. Frames sent before the connection is there wait in it.
class Link : public ConnectionHandler, public std::enable_shared_from_this<Link> {
 public:
  Link(ConnectionPool& pool, uint64_t id, WorkerInfo peer) : pool_(pool), id_(id), peer_(std::move(peer)) {}

  uint64_t id() const { return id_; }
  /// The peer; for an accepted link known from HELLO on, which comes before any other frame.
  const WorkerInfo& peer() const { return peer_; }

  /// As Connection::send. Thread-safe.
  void send(Frame frame, std::function<void(Status)> done);

  void onFrame(Frame frame) override;
  void onClosed(const Error& reason) override;

 private:
  friend class ConnectionPool;
  struct Waiting {
    Frame frame;
    std::function<void(Status)> done;
  };
  void attach(std::shared_ptr<Connection> connection);
  void close();

  ConnectionPool& pool_;
  const uint64_t id_;
  // set on the loop before any other frame is looked at:
  WorkerInfo peer_;
  Mutex mutex_;
  // guarded by mutex_:
  std::shared_ptr<Connection> connection_;
  std::deque<Waiting> waiting_;
  Status closed_;
};

class ConnectionPool {
 public:
  struct Events {
    /// A frame other than HELLO.
    std::function<void(const std::shared_ptr<Link>&, Frame)> on_frame;
    /// A link has ended; what was sent over it is not going to be answered.
    std::function<void(const Link&, const Error& reason)> on_lost;
  };

  ConnectionPool(Transport& transport, const WorkerDirectory& directory, uint64_t incarnation, Events events);

  /// Starts accepting; returns the address to publish.
  std::string listen();

  /// The link to a worker, opened if need be. Throws Error(kUnknownWorker).
  std::shared_ptr<Link> link(const WorkerInfo& to);

  size_t size() const;

 private:
  friend class Link;
  std::string hello() const;
  /// Reads HELLO and makes the link usable for our own messages; throws Error(kProtocol).
  void greet(Link& link, Frame frame);
  void remove(const Link& link, const Error& reason);

  Transport& transport_;
  const WorkerDirectory& directory_;
  const uint64_t incarnation_;
  const Events events_;
  std::atomic<uint64_t> next_link_{1};
  mutable Mutex mutex_;
  // guarded by mutex_:
  std::unordered_map<WorkerId, std::shared_ptr<Link>> links_;
};

}  // namespace torchrpc
