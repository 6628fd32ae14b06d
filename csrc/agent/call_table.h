#pragma once

// The outstanding requests of a node, each with the handler of its reply. The code that takes an entry out of the table
// completes it, exactly once. A reply without an entry is late or repeated: it is counted, not asserted.
// Threads: any.

#include <atomic>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "agent/activity.h"
#include "agent/messenger.h"
#include "base/sync/mutex.h"

namespace torchrpc {

/// How one sending of a call that may be repeated has ended.
struct Attempt {
  bool is_answered = false;  ///< by the callee, perhaps with an error
  bool is_refused = false;   ///< the callee has answered that it has not begun the call, because it ends
  uint64_t sent_to = 0;      ///< the incarnation of the callee that it may have reached; 0: it has reached none
};

class CallTable {
 public:
  struct Call {
    WorkerId to = kNoWorker;
    uint64_t link = 0;         ///< that the request was sent over; 0: not sent yet, or to this worker itself
    uint64_t incarnation = 0;  ///< of the worker to which that link leads
    Duration timeout = kNoLimit;
    TimePoint deadline = kNever;
    TimePoint since{};  ///< when it was made
    int thread = 0;     ///< that made it
    Kind kind{};
    size_t bytes = 0;     ///< of the request, roughly
    ActivityToken token;  ///< the call counts as under way until its handler is destroyed
    Messenger::ReplyHandler handler;
    Attempt* attempt = nullptr;  ///< the handler owns it; null: the call is not repeated
    ReplyObserver::Note note{};
  };

  /// A new id, for a call that is added later.
  CallId nextId() { return next_id_.fetch_add(1, std::memory_order_relaxed); }

  /// After close() it returns false and leaves `call` as it is. `needs_timer` is set to whether takeExpired() must be
  /// called at the deadline of this call: only if no earlier or equal time has been asked for. Most calls end long
  /// before their deadline and need no timer.
  bool add(CallId id, Call& call, bool& needs_timer);
  /// The request has been given to that link, to that incarnation of its worker; false if the call is no longer in the
  /// table.
  bool assign(CallId id, uint64_t link, uint64_t incarnation);
  std::optional<Call> take(CallId id);
  /// For a reply that has come from that worker, over whichever link: it may have opened a second one meanwhile, and a
  /// request that is repeated may be answered over the first. Takes nothing, and sets `is_foreign`, if the call has not
  /// been sent to that worker.
  std::optional<Call> takeFor(CallId id, WorkerId from, uint64_t incarnation, bool& is_foreign);
  bool contains(CallId id) const;
  /// Takes the calls whose requests were sent over a link.
  std::vector<Call> takeLink(uint64_t link);
  /// Takes the calls whose deadline has passed. `next` is set to the time when it must be called again; kNever if an
  /// add() will ask for it.
  std::vector<Call> takeExpired(TimePoint now, TimePoint& next);
  /// Takes all calls, and accepts no more.
  std::vector<Call> close();

  size_t size() const;
  /// What can be seen of a call.
  struct Row {
    CallId id = 0;
    WorkerId to = kNoWorker;
    Kind kind{};
    bool is_sent = false;
    TimePoint since{};
    TimePoint deadline = kNever;
    size_t bytes = 0;
    int thread = 0;
  };
  /// All calls, or `most` of them.
  std::vector<Row> rows(size_t most) const;
  /// Waits until the table has capacity for another call; false after `timeout`.
  bool waitForCapacity(Duration timeout);
  /// Adds the workers with outstanding requests.
  void addOutstanding(std::set<WorkerId>& workers) const;

 private:
  // Enough to keep any network busy, and not too much for slow callees to hold in memory.
  static constexpr size_t kMaxCalls = 1 << 14;
  static constexpr size_t kMaxBytes = size_t{1} << 30;

  using Calls = std::unordered_map<CallId, Call>;

  std::atomic<CallId> next_id_{1};
  mutable Mutex mutex_;
  CondVar capacity_freed_;
  bool closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
  Calls calls_ TORCHRPC_GUARDED_BY(mutex_);
  /// A heap with the earliest deadline first. It keeps the deadlines of calls that have ended.
  std::vector<std::pair<TimePoint, CallId>> deadlines_ TORCHRPC_GUARDED_BY(mutex_);
  size_t bytes_ TORCHRPC_GUARDED_BY(mutex_) = 0;             ///< of all calls
  TimePoint timer_at_ TORCHRPC_GUARDED_BY(mutex_) = kNever;  ///< when takeExpired() will be called

  bool hasCapacity() const TORCHRPC_REQUIRES(mutex_) {
    return closed_ || (calls_.size() < kMaxCalls && bytes_ < kMaxBytes);
  }
  std::optional<Call> takeLocked(CallId id) TORCHRPC_REQUIRES(mutex_);
  Call takeAt(Calls::iterator it) TORCHRPC_REQUIRES(mutex_);
  void addDeadline(TimePoint deadline, CallId id) TORCHRPC_REQUIRES(mutex_);
  /// Takes the earliest deadline off the heap.
  std::pair<TimePoint, CallId> popDeadline() TORCHRPC_REQUIRES(mutex_);
};

}  // namespace torchrpc
