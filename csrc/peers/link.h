#pragma once

// A connection to one worker, and what is known about that worker while the connection lasts.
// Threads: Link::send() and the methods that say so: any; the others: the transport's loop.

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/sync/mutex.h"
#include "peers/audit_log.h"
#include "peers/flow_control.h"
#include "peers/peer.h"
#include "peers/quotas.h"
#include "transport/transport.h"

namespace torchrpc {

class ConnectionPool;

/// The error of what belongs to an earlier start of the worker.
Error replacedError(const WorkerInfo& worker);

/// The error for a worker whose record has another role than the worker has proved.
Error falseRole(const WorkerInfo& peer);

/// A connection and the worker at its other end. Frames that are sent before the connection is attached wait in the
/// link.
class Link : public ConnectionHandler, public std::enable_shared_from_this<Link> {
 public:
  Link(ConnectionPool& pool, uint64_t id, Peer peer = {});

  uint64_t id() const { return id_; }
  /// The peer. An inbound link learns it from HELLO, which arrives before any other frame.
  const Peer& peer() const { return peer_; }
  /// Whether the peer may inspect this worker.
  bool mayInspect() const { return !identity_ || identity_->mayInspect(); }
  /// The name that the peer has proved; empty: none.
  std::string provedName() const { return identity_ ? identity_->name : ""; }

  /// The peer in the audit log: the name that it has proved; without one, unprovedName() of the name that it claims.
  std::string nameForAudit(const std::string& claimed) const {
    return identity_ ? identity_->name : unprovedName(claimed);
  }

  /// The peer in the audit log, by the name that it has proved or, without a proof, claimed last.
  std::string nameForAudit() const { return nameForAudit(peer_.name.empty() ? claimed_name_ : peer_.name); }

  /// Answers a PING. One PONG answers all PINGs that arrive before it has been written.
  void sendPong();
  /// As Connection::send. Thread-safe.
  void send(Frame&& frame, SentHandler&& done);
  /// The same for a call, which may be held back: see Note [Flow control].
  void sendCall(CallId call, Frame&& frame, SentHandler&& done);
  /// Called when the reply to a call of this worker has arrived, or the call could not be sent. Thread-safe.
  void onAnswered(CallId call);
  /// Called when the peer has sent a STARTED message.
  void onStarted(const StartReport& report);
  /// The calls of the peer that run here. Thread-safe.
  StartedCalls& startedCalls() { return started_calls_; }
  /// The replies to the peer. Thread-safe.
  ReplyQueueLimit& replyQueue() { return reply_queue_; }
  /// The part of its quota that the peer uses; null: the peer has no quota.
  const std::shared_ptr<CallerUsage>& usage() const { return usage_; }
  /// The error that answers all requests over this link. Set if the peer has opened more connections than its quota
  /// allows.
  const Status& refusal() const { return refusal_; }
  /// Calls that are held back.
  size_t heldCount() const { return request_window_.heldCount(); }

  /// Whether replaceLinks() has closed this link, because a later start of the worker, or another worker with its
  /// id, has joined. Messages of this link do not count any more.
  bool isReplaced() const { return is_replaced_.load(std::memory_order_relaxed); }
  /// Closes the connection; its end is then reported with this reason. Thread-safe.
  void close(Error reason);
  /// Whether bytes have arrived from the peer since the last call. Called by one thread at a time.
  bool consumeActivity();

  // The end of this node: see Note [The end of a node] in agent.cpp. Thread-safe.
  /// Count a request of the peer that has arrived, and one that has been answered.
  void addUnanswered() { unanswered_.fetch_add(1); }
  void removeUnanswered() { unanswered_.fetch_sub(1); }
  /// Whether the peer waits for answers, and for how many.
  bool hasUnanswered() { return unansweredCount() > 0; }
  size_t unansweredCount() {
    const auto count = unanswered_.load();
    return count > 0 && !isClosed() ? static_cast<size_t>(count) : 0;
  }
  /// Makes the end of this node wait until the peer has read everything, which the peer shows by closing the
  /// connection.
  void requireReader() { requires_reader_ = true; }
  /// Sends GOODBYE. `sent` is called when it has been written or cannot be.
  void sendGoodbye(std::function<void()> sent);
  /// Whether the end of this node need not wait for this link (any more).
  bool isLeft();
  bool isClosed();
  /// Whether a frame has ever arrived from the peer.
  bool hasReceived() const { return has_received_.load(); }
  /// As Connection::progress(); 0 while there is no connection.
  uint64_t progress();
  /// As Connection::describe(); empty while there is no connection.
  std::string describe();
  /// As Connection::whyNotOpen(); empty while there is no connection.
  std::string whyNotOpen();

  void onIdentity(const PeerIdentity& identity) override;
  void onClaimedName(const std::string& name) override;
  /// Charges the bytes to the quota of the peer, before they arrive.
  Status onAnnounced(std::string_view head_begin, uint64_t bytes) override;
  /// Returns the token of the bytes of the frame that has just arrived, if it was announced. On the loop.
  CallerUsage::Token takeAnnouncedToken() { return std::exchange(announced_token_, nullptr); }
  /// Closes the connection because of what the peer does, with a line in the log and in the audit log. Thread-safe.
  void cutOff(const Error& reason);
  void onFrame(Frame&& frame) override;
  void onClosed(const Error& reason) override;

 private:
  friend class ConnectionPool;
  struct Waiting {
    Frame frame;
    SentHandler done;
  };
  void attach(const std::shared_ptr<Connection>& connection);
  /// Null while there is no connection.
  std::shared_ptr<Connection> connection();
  /// Sends the calls that need not be held back any more.
  void sendHeld();
  void sendAdmitted(RequestWindow::Call call);
  /// Counts this inbound link against the quota of the peer of that name, and closes it if it is over the quota.
  void countConnection(const std::string& name);
  /// Throws Error(kProtocol) if the peer has proved, or said in the handshake, that it is another worker than `peer`.
  void checkIdentity(const WorkerInfo& peer) const;
  /// Handles a frame that arrives before the peer is known: HELLO, the PING of anyAnswersPing(), or the INSPECT of an
  /// observer, which is no worker.
  void onFirstFrame(Frame&& frame);

  ConnectionPool& pool_;
  const uint64_t id_;
  const bool is_inbound_;
  // Set by the handshake and HELLO, on the loop, before the link is published:
  Peer peer_;
  std::shared_ptr<CallerUsage> usage_;
  Status refusal_;
  // Set before the first frame, on the loop; empty if the transport proves no identity, or knows no names:
  std::optional<PeerIdentity> identity_;
  std::string claimed_name_;
  // On the loop:
  bool is_counted_ = false;  ///< against the quota of connections
  CallerUsage::Token announced_token_;
  // Own synchronization:
  RequestWindow request_window_;
  StartedCalls started_calls_;
  ReplyQueueLimit reply_queue_;
  std::atomic<bool> frame_arrived_{false};  ///< since the last consumeActivity()
  std::atomic<bool> has_received_{false};   ///< a frame has ever arrived from the peer
  bool is_refused_ = false;  ///< it is about to be closed: frames that arrive until then are not read. On the loop
  std::atomic<bool> is_replaced_{false};
  std::atomic<bool> is_pong_queued_{false};
  std::atomic<int64_t> unanswered_{0};
  std::atomic<bool> requires_reader_{false};
  std::atomic<bool> is_goodbye_written_{false};
  /// connection_ from attach() on, until the link closes. Written with mutex_; send() reads it without.
  std::atomic<Connection*> open_{nullptr};
  // Used by consumeActivity():
  uint64_t progress_ = 0;
  Mutex mutex_;
  /// Set once, and kept as long as the link, because a thread may be in send().
  std::shared_ptr<Connection> connection_ TORCHRPC_GUARDED_BY(mutex_);
  std::deque<Waiting> waiting_ TORCHRPC_GUARDED_BY(mutex_);
  CallerUsage::Token connection_token_ TORCHRPC_GUARDED_BY(mutex_);  ///< until the link closes
  Status close_reason_ TORCHRPC_GUARDED_BY(mutex_);                  ///< the reason that this side has given to close()
  Status closed_ TORCHRPC_GUARDED_BY(mutex_);                        ///< why the connection has ended
};

}  // namespace torchrpc
