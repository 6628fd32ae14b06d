#pragma once

// Bounds the memory of calls and results that wait on a worker. Each link has one object of each of the three classes
// below.
// Threads: any.
//
// Note [Flow control]
// Two things can pile up on a callee: calls that have arrived and wait for a thread, and replies that their callers do
// not read. The option `max_queued_bytes` (Agent::Options) bounds both.
// - Calls. The callee tells each caller how many bytes of calls may wait there (the window), and which calls have
//   started. It does so in STARTED messages, which it sends now and then, and by the replies. While that many bytes
//   wait, the caller holds back further calls, in order. The callee divides its limit among the callers that send large
//   calls.
// - Replies. While more bytes than the limit wait to be sent over a link, the calls of that peer do not start. They are
//   deferred, in order, until half of the bytes have been sent.
// Neither can cause a deadlock:
// - A transport never stops reading. So replies, errors, STARTED and control messages arrive however many calls wait,
//   and the replies to a peer that lives are sent in the end. They do not wait for a thread of the peer.
// - A call is held back only while earlier calls of the same caller wait for a thread of the callee. It would wait
//   behind them there, too. A thread that waits for a call of its own is replaced, so nested calls find a thread.
// - The callee may not have reported all calls that have started, but the unreported ones have fewer bytes than the
//   window. So a caller whose calls have all started may send, and a single call of any size may be sent.
// Fetches of values (to_here) are deferred like calls, but never held back: they are small. Messages of the protocols
// between nodes are neither held back nor deferred.
// Running calls are not bounded: the replies of functions that run at the same time may exceed the limit.

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "base/sync/mutex.h"
#include "transport/transport.h"
#include "wire/message.h"

namespace torchrpc {

/// The value of TORCHRPC_MAX_QUEUED_BYTES, or kDefaultMaxQueuedBytes. Throws Error(kInvalidArgument) if it is not a
/// positive integer.
size_t defaultMaxQueuedBytes();

/// Calls of fewer bytes are not counted: the call table limits their number.
constexpr size_t kMinCountedBytes = 16 << 10;

size_t bytesOf(const Frame& frame);

/// The payload of a STARTED message.
struct StartReport {
  uint64_t window = 0;          ///< the bytes of calls that may wait from now on
  std::vector<CallId> started;  ///< calls that do not wait any more

  std::string encode() const;
  /// Throws Error(kProtocol).
  static StartReport decode(const std::string& payload);
};

/// On the caller: the calls that wait on the callee, and those that are held back here.
class RequestWindow {
 public:
  /// The window until the first STARTED message; see PROTOCOL.md.
  static constexpr size_t kInitialBytes = 4 << 20;

  struct Call {
    CallId id;
    size_t bytes;
    Frame frame;
    SentHandler done;
  };

  /// Whether a call of this size must be passed to admit().
  bool concerns(size_t bytes) const { return bytes >= kMinCountedBytes || has_held_.load(std::memory_order_relaxed); }
  /// Returns the call if it may be sent now, else holds it back.
  std::optional<Call> admit(Call call);
  /// Removes a call that does not wait on the callee any more. If it returns true, the calling thread has to send the
  /// calls that takeHeld() returns, until takeHeld() returns nullopt.
  [[nodiscard]] bool release(CallId id);
  [[nodiscard]] bool release(const StartReport& report);
  /// Takes the next held call that may be sent.
  std::optional<Call> takeHeld();
  /// Returns the calls that are held back, and holds no more.
  std::deque<Call> close();
  size_t heldCount() const;

 private:
  bool hasRoom() const TORCHRPC_REQUIRES(mutex_) { return waiting_bytes_ < window_; }
  void add(const Call& call) TORCHRPC_REQUIRES(mutex_);
  void remove(CallId id) TORCHRPC_REQUIRES(mutex_);
  bool beginSendingHeld() TORCHRPC_REQUIRES(mutex_);

  // Own synchronization.
  std::atomic<bool> has_held_{false};
  std::atomic<size_t> waiting_count_{0};

  // Guarded by mutex_.
  mutable Mutex mutex_;
  bool closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
  bool sending_held_ TORCHRPC_GUARDED_BY(mutex_) = false;  ///< a thread calls takeHeld() until it returns nothing
  size_t window_ TORCHRPC_GUARDED_BY(mutex_) = kInitialBytes;
  size_t waiting_bytes_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  std::unordered_map<CallId, size_t> waiting_ TORCHRPC_GUARDED_BY(mutex_);  ///< the bytes of each counted call
  std::deque<Call> held_ TORCHRPC_GUARDED_BY(mutex_);
};

/// On the callee: the calls of one caller that have started, to be reported to it.
class StartedCalls {
 public:
  /// `senders`: the number of links over which counted calls have come, shared by all links of a node.
  StartedCalls(size_t max_queued_bytes, std::shared_ptr<std::atomic<size_t>> senders)
      : max_queued_bytes_(max_queued_bytes), senders_(std::move(senders)) {}
  ~StartedCalls();
  StartedCalls(const StartedCalls&) = delete;
  StartedCalls& operator=(const StartedCalls&) = delete;

  void onArrived(size_t bytes);
  /// Returns a report if it is time for one.
  std::optional<StartReport> onStarted(CallId id, size_t bytes);
  /// Called when a call is answered: the reply shows the caller that it has started, so no report is needed.
  void onAnswered(CallId id);

 private:
  struct Started {
    CallId id;
    size_t bytes;
  };

  // Constant after construction.
  const size_t max_queued_bytes_;
  const std::shared_ptr<std::atomic<size_t>> senders_;

  // Own synchronization.
  std::atomic<bool> is_sender_{false};
  std::atomic<bool> has_unreported_{false};

  // Guarded by mutex_.
  Mutex mutex_;
  size_t window_ TORCHRPC_GUARDED_BY(mutex_) = RequestWindow::kInitialBytes;  ///< as last reported
  size_t unreported_bytes_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  std::vector<Started> unreported_ TORCHRPC_GUARDED_BY(mutex_);
};

/// On the callee: the bytes of replies to one caller that wait to be sent, and the calls that are deferred meanwhile.
class ReplyQueueLimit {
 public:
  /// Posts a deferred call to its executor. Returns false if the executor is closed; the call has been answered in that
  /// case.
  using Resume = std::function<bool()>;

  explicit ReplyQueueLimit(size_t max_queued_bytes) : max_queued_bytes_(max_queued_bytes) {}

  void onReply(size_t bytes) {
    queued_bytes_.fetch_add(bytes);
    queued_replies_.fetch_add(1);
  }
  /// Called when a reply has been sent, or could not be sent. May resume deferred calls.
  void onReplySent(size_t bytes);

  /// Whether a call that is about to start has to be deferred.
  bool shouldDefer() const {
    return has_deferred_.load(std::memory_order_relaxed) || queued_bytes_.load() > max_queued_bytes_;
  }
  /// Calls `resume` once, when the call may start, perhaps before defer() returns. After close() destroys it uncalled.
  void defer(Resume resume);
  /// Called when a resumed call starts. Resumes the next one if that may start.
  void onResumedStart();
  /// Drops the deferred calls, and defers no more.
  void close();

  /// Whether more replies wait, of whatever size, than a caller can have outstanding requests. Then the caller does not
  /// read them.
  bool isOverrun() const { return queued_replies_.load() > kMaxReplies; }
  size_t queuedBytes() const { return queued_bytes_.load(); }
  size_t deferredCount() const;

 private:
  void resumeNext();
  Resume takeNext();

  static constexpr size_t kMaxReplies = 1 << 16;  // a multiple of the outstanding requests of a worker: see CallTable

  // Constant after construction.
  const size_t max_queued_bytes_;

  // Own synchronization.
  std::atomic<size_t> queued_bytes_{0};
  std::atomic<size_t> queued_replies_{0};
  std::atomic<bool> has_deferred_{false};

  // Guarded by mutex_.
  mutable Mutex mutex_;
  bool closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
  bool resuming_ TORCHRPC_GUARDED_BY(mutex_) = false;  ///< a resumed call has not started yet
  std::deque<Resume> deferred_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
