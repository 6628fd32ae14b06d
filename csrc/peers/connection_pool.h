#pragma once

// The links of a node. The node sends its messages to a peer over one link, which the first message opens. The opener
// of a connection sends HELLO first; from then on both sides send over it.
// Threads: ConnectionPool::link(), Link::send() and the methods that say so: any; the others: the transport's loop.

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"
#include "peers/audit_log.h"
#include "peers/link.h"
#include "peers/quotas.h"
#include "peers/worker_directory.h"
#include "transport/transport.h"

namespace torchrpc {

/// The version of the protocol between nodes, sent in HELLO.
constexpr uint32_t kProtocolVersion = 6;

class ConnectionPool {
 public:
  struct Events {
    /// Called when a later start of a worker than the directory knows has connected. Only HELLO has been read from it.
    std::function<void(const Peer&)> on_restarted;
    /// Called with each frame of a worker other than HELLO.
    std::function<void(const std::shared_ptr<Link>&, Frame&&)> on_frame;
    /// Whether that worker of the directory has been lost or has left.
    std::function<bool(const WorkerInfo&)> is_lost;
    /// Whether this is the reply of that worker for which a call of this one waits.
    std::function<bool(CallId, const Link&)> is_awaited;
    /// Called with an INSPECT of a peer that has not said, by HELLO, which worker it is.
    std::function<void(const std::shared_ptr<Link>&, Frame&&)> on_inspect;
    /// Called when a link has ended: requests that were sent over it will not be answered.
    std::function<void(const Link&, const Error& reason)> on_lost;
    /// Called for the first frame that arrives over a link since consumeActivity().
    std::function<void(const Link&)> on_activity;
  };

  struct Options {
    int32_t world_size = 0;       ///< 0: the group grows
    size_t max_queued_bytes = 0;  ///< see Note [Flow control]
    Quotas* quotas = nullptr;     ///< of peers; null: none
    std::shared_ptr<AuditLog> audit_log{};
  };

  ConnectionPool(Transport& transport, const WorkerDirectory& directory, const Options& options, Events events);

  /// Starts accepting; returns the address to publish.
  std::string listen();

  /// Returns the link to a worker; opens it if there is none. Throws Error(kUnknownWorker).
  std::shared_ptr<Link> link(WorkerId to);
  /// The links over which this node sends, one for each peer. Thread-safe, as are hasLink() and size().
  std::vector<std::shared_ptr<Link>> links() const;
  bool hasLink(WorkerId to) const;
  /// All links, the oldest first, also those over which only the peer sends. Thread-safe.
  std::vector<std::shared_ptr<Link>> allLinks() const;
  /// The link of that id; null: it has ended. Thread-safe.
  std::shared_ptr<Link> find(uint64_t id) const;
  /// Whether the link of that id has not ended. Thread-safe.
  bool isOpen(uint64_t id) const;
  /// What flow control holds up on all links: see Note [Flow control].
  struct Queued {
    size_t reply_bytes = 0;
    size_t deferred_calls = 0;
    size_t held_calls = 0;
  };
  Queued queued() const;
  /// To be called when the directory has a new worker or a later start of one. Closes all links, inbound ones
  /// included, that have its id and belong to another peer. If a link of this peer is open, this node sends over it
  /// from now on. Thread-safe.
  void replaceLinks(const Peer& peer, const Error& reason);
  /// Calls `done` once, on the loop, when the loop has read everything that had arrived before this call.
  void afterReading(std::function<void()> done) { transport_.afterReading(std::move(done)); }
  /// Whether one of the workers' addresses answers a PING. Dials 32 addresses at a time, and waits for `timeout` at
  /// most for their answers. Blocks; not to be called on the loop.
  bool anyAnswersPing(const std::vector<WorkerRecord>& workers, Duration timeout);

  size_t size() const;

  /// Records in the audit log that something of the peer of that name was refused: "connect", the kind of a message, or
  /// "disconnect" if its connection is closed for that. Thread-safe.
  void recordRefusal(const std::string& peer, const Error& reason, std::string_view action = "connect") const;

 private:
  friend class Link;
  std::string hello() const;
  /// Reads the HELLO of an inbound link: see Note [Workers that are not known yet]. Throws Error(kProtocol).
  void acceptHello(Link& link, Frame&& frame);
  /// Lets this node send over the link, unless it sends over another one of the same peer.
  void use(const std::shared_ptr<Link>& link);
  /// Counts an inbound link against the quota of the peer of that name. Throws Error(kQuotaExceeded).
  void takeQuota(Link& link, const std::string& peer);
  void remove(const Link& link, const Error& reason);

  Transport& transport_;
  const WorkerDirectory& directory_;
  const Options options_;
  const Events events_;
  /// Shared with the links, which may outlive the pool. See StartedCalls.
  const std::shared_ptr<std::atomic<size_t>> senders_ = std::make_shared<std::atomic<size_t>>(0);
  std::atomic<uint64_t> next_link_{1};
  mutable Mutex mutex_;
  std::unordered_map<WorkerId, std::shared_ptr<Link>> links_ TORCHRPC_GUARDED_BY(mutex_);
  /// The links by id, except inbound ones whose HELLO has not been accepted.
  std::map<uint64_t, std::weak_ptr<Link>> all_links_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
