#pragma once

// The links of a node: it sends its messages to a peer over one link, which the first message opens. The opener of a
// connection sends HELLO first; from then on both sides send over it.
// Threads: ConnectionPool::link() and Link::send() from any, methods that say so too; the rest on the transport's loop.

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

/// A connection and the worker at its other end. Frames that are sent before the connection is attached wait in the
/// link.
class Link : public ConnectionHandler, public std::enable_shared_from_this<Link> {
 public:
  Link(ConnectionPool& pool, uint64_t id, WorkerInfo peer = {}, uint64_t incarnation = 0)
      : pool_(pool), id_(id), peer_(std::move(peer)), incarnation_(incarnation) {}

  uint64_t id() const { return id_; }
  /// The peer. An inbound link knows it from HELLO on, which arrives before any other frame.
  const WorkerInfo& peer() const { return peer_; }
  /// The number of the peer's start; known as soon as the peer is.
  uint64_t incarnation() const { return incarnation_; }

  /// As Connection::send. Thread-safe.
  void send(Frame frame, std::function<void(Status)> done);
  /// Closes the connection; its end is then reported with this reason. Thread-safe.
  void close(Error reason);
  /// Whether bytes have arrived from the peer since the last call. Called by one thread at a time.
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
  /// The first frame of an inbound link: HELLO, or the PING of answersPing().
  void onFirstFrame(Frame frame);

  ConnectionPool& pool_;
  const uint64_t id_;
  // Set by HELLO, on the loop, before the link is published:
  WorkerInfo peer_;
  uint64_t incarnation_;
  std::atomic<bool> frame_arrived_{false};  ///< since the last consumeActivity()
  // Used by consumeActivity():
  uint64_t progress_ = 0;
  Mutex mutex_;
  std::shared_ptr<Connection> connection_ TORCHRPC_GUARDED_BY(mutex_);
  std::deque<Waiting> waiting_ TORCHRPC_GUARDED_BY(mutex_);
  Status close_reason_ TORCHRPC_GUARDED_BY(mutex_);  ///< of this side, given to close()
  Status closed_ TORCHRPC_GUARDED_BY(mutex_);        ///< why the connection has ended
};

class ConnectionPool {
 public:
  struct Events {
    /// A frame other than HELLO.
    std::function<void(const std::shared_ptr<Link>&, Frame)> on_frame;
    /// A link has ended: requests that were sent over it will not be answered.
    std::function<void(const Link&, const Error& reason)> on_lost;
    /// A frame has arrived over a link, the first one since consumeActivity().
    std::function<void(const Link&)> on_activity;
  };

  /// `grows`: the group grows, so a HELLO may come from a later start of a known worker.
  ConnectionPool(
      Transport& transport, const WorkerDirectory& directory, uint64_t incarnation, bool grows, Events events);

  /// Starts accepting; returns the address to publish.
  std::string listen();

  /// The link to a worker, opened if there is none. Throws Error(kUnknownWorker).
  std::shared_ptr<Link> link(WorkerId to);
  /// The links over which this node sends, one for each peer. Thread-safe, as are hasLink() and size().
  std::vector<std::shared_ptr<Link>> links() const;
  bool hasLink(WorkerId to) const;
  /// Closes all links to one incarnation of a worker, inbound ones included. Thread-safe.
  void closeAll(const WorkerRecord& peer, const Error& reason);
  /// Whether the worker's address answers a PING within `timeout`. Blocks; not on the loop.
  bool answersPing(const WorkerRecord& worker, Duration timeout);

  size_t size() const;

 private:
  friend class Link;
  std::string hello() const;
  /// Reads the HELLO of an inbound link, over which this node may send from then on. Throws Error(kProtocol).
  void acceptHello(Link& link, Frame frame);
  void remove(const Link& link, const Error& reason);

  Transport& transport_;
  const WorkerDirectory& directory_;
  const uint64_t incarnation_;
  const bool grows_;
  const Events events_;
  std::atomic<uint64_t> next_link_{1};
  mutable Mutex mutex_;
  std::unordered_map<WorkerId, std::shared_ptr<Link>> links_ TORCHRPC_GUARDED_BY(mutex_);
  /// All inbound links whose HELLO has been accepted; some may have ended.
  std::vector<std::weak_ptr<Link>> inbound_links_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
