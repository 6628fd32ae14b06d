#pragma once

// The connections of a node, at most one chosen per peer, opened with the first message to it. A connection begins
// with HELLO in the opener's direction; from then on both sides send over it.
// Threads: link() and send() from any; the rest on the transport's loop.

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "agent/worker_directory.h"
#include "base/sync/mutex.h"
#include "transport/transport.h"

namespace torchrpc {

class ConnectionPool;

/// A connection and the worker at its other end. Frames sent before the connection is there wait in it.
class Link : public ConnectionHandler, public std::enable_shared_from_this<Link> {
 public:
  Link(ConnectionPool& pool, uint64_t id, WorkerInfo peer = {}, uint64_t incarnation = 0)
      : pool_(pool), id_(id), peer_(std::move(peer)), incarnation_(incarnation) {}

  uint64_t id() const { return id_; }
  /// The peer; for an accepted link known from HELLO on, which comes before any other frame.
  const WorkerInfo& peer() const { return peer_; }
  /// Which of the peer's starts; known with it.
  uint64_t incarnation() const { return incarnation_; }

  /// As Connection::send. Thread-safe.
  void send(Frame frame, std::function<void(Status)> done);
  /// Ends it, because `why`. Thread-safe.
  void close(Error why);
  /// Whether anything has come from the peer since the last time this was asked. By one thread.
  bool consumeActivity();

  void onFrame(Frame frame) override;
  void onClosed(const Error& reason) override;

 private:
  friend class ConnectionPool;
  struct Waiting {
    Frame frame;
    std::function<void(Status)> done;
  };
  void attach(std::shared_ptr<Connection> connection);
  /// The first frame of an accepted link.
  void begin(Frame frame);

  ConnectionPool& pool_;
  const uint64_t id_;
  // set on the loop before any other frame is looked at:
  WorkerInfo peer_;
  uint64_t incarnation_;
  std::atomic<bool> frame_came_{false};  ///< since consumeActivity()
  // who asks consumeActivity():
  uint64_t progress_ = 0;
  Mutex mutex_;
  // guarded by mutex_:
  std::shared_ptr<Connection> connection_;
  std::deque<Waiting> waiting_;
  Status close_reason_;  ///< why this side ends it
  Status closed_;
};

class ConnectionPool {
 public:
  struct Events {
    /// A frame other than HELLO.
    std::function<void(const std::shared_ptr<Link>&, Frame)> on_frame;
    /// A link has ended; what was sent over it is not going to be answered.
    std::function<void(const Link&, const Error& reason)> on_lost;
    /// A frame has come over a link, the first since consumeActivity() was asked of it.
    std::function<void(const Link&)> on_heard;
  };

  /// `grows`: a worker that says that it has been started again is believed.
  ConnectionPool(
      Transport& transport, const WorkerDirectory& directory, uint64_t incarnation, bool grows, Events events);

  /// Starts accepting; returns the address to publish.
  std::string listen();

  /// The link to a worker, opened if need be. Throws Error(kUnknownWorker).
  std::shared_ptr<Link> link(WorkerId to);
  /// The links that messages are sent over, one a peer.
  std::vector<std::shared_ptr<Link>> links() const;
  bool hasLink(WorkerId to) const;
  /// Ends all links to a worker as it was once; those that it opened, too.
  void closeAll(const WorkerRecord& peer, const Error& why);
  /// Whether somebody at that address answers a PING. Blocks, at most so long.
  bool answers(const WorkerRecord& worker, Duration patience);

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
  const bool grows_;
  const Events events_;
  std::atomic<uint64_t> next_link_{1};
  mutable Mutex mutex_;
  // guarded by mutex_:
  std::unordered_map<WorkerId, std::shared_ptr<Link>> links_;
  std::vector<std::weak_ptr<Link>> greeted_;  ///< all that peers have opened and that are still there
};

}  // namespace torchrpc
