#pragma once

// The outstanding requests of a node, each with the handler of its reply. The code that takes an entry out of the table
// completes it, exactly once. A reply without an entry is late or repeated: it is counted, not asserted.
// Threads: any.

#include <atomic>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/sync/mutex.h"
#include "calls/client_call.h"

namespace torchrpc {

class CallTable {
 public:
  /// Returns a new id, for a call that is added later.
  CallId nextId() { return next_id_.fetch_add(1, std::memory_order_relaxed); }

  /// Adds a call. After close() returns false and leaves `call` as it is. Sets `needs_timer` to whether the caller must
  /// schedule takeExpired() at the deadline of this call: only if it is not scheduled for then or earlier. Most calls
  /// end long before their deadline and need no timer.
  bool add(CallId id, ClientCall& call, bool& needs_timer);
  /// Records the link over which the request is sent, and the peer at its other end. Returns false if the call is no
  /// longer in the table.
  bool assign(CallId id, uint64_t link, PeerId callee);
  std::optional<ClientCall> take(CallId id);
  /// Takes the call of a reply from that peer. The reply may come over any of its links: the peer may have opened a
  /// second one meanwhile, and may answer a repeated request over the first. Takes nothing, and sets `is_foreign`, if
  /// the call has not been sent to that peer.
  std::optional<ClientCall> takeFor(CallId id, PeerId from, bool& is_foreign);
  bool contains(CallId id) const;
  /// Whether takeFor() would take a call.
  bool awaits(CallId id, PeerId from) const;
  /// Takes the calls whose requests were sent over a link.
  std::vector<ClientCall> takeLink(uint64_t link);
  /// The ids of the calls that were made while that call was served.
  std::vector<CallId> madeFor(const ServedId& served) const;
  /// Takes the calls whose deadline has passed. Sets `next` to the time at which it must be called again, or to kNever
  /// if no timer has to be set now.
  std::vector<ClientCall> takeExpired(TimePoint now, TimePoint& next);
  /// Takes all calls, and accepts no more.
  std::vector<ClientCall> close();

  size_t size() const;
  /// The state of a call, for inspection.
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
  /// Returns all calls, or `most` of them.
  std::vector<Row> rows(size_t most) const;
  /// Waits until the table has capacity for another call. Returns false after `timeout`.
  bool waitForCapacity(Duration timeout);
  /// Adds the workers to which requests are outstanding.
  void addOutstanding(std::set<WorkerId>& workers) const;

 private:
  // Enough to keep any network busy, and not too much for slow callees to hold in memory.
  static constexpr size_t kMaxCalls = 1 << 14;
  static constexpr size_t kMaxBytes = size_t{1} << 30;

  static constexpr size_t kMaxSpare = 1024;  // nodes, of a few hundred bytes each

  using Calls = std::unordered_map<CallId, ClientCall>;

  std::atomic<CallId> next_id_{1};
  mutable Mutex mutex_;
  CondVar capacity_freed_;
  bool closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
  Calls calls_ TORCHRPC_GUARDED_BY(mutex_);
  /// Nodes of the map whose calls have been taken; the next calls use their memory.
  std::vector<Calls::node_type> spare_ TORCHRPC_GUARDED_BY(mutex_);
  /// A heap with the earliest deadline first. It keeps the deadlines of calls that have ended.
  std::vector<std::pair<TimePoint, CallId>> deadlines_ TORCHRPC_GUARDED_BY(mutex_);
  size_t bytes_ TORCHRPC_GUARDED_BY(mutex_) = 0;  ///< of all calls
  std::atomic<bool> is_full_{false};  ///< written with the mutex; a caller that finds it false does not take the mutex
  TimePoint timer_at_ TORCHRPC_GUARDED_BY(mutex_) = kNever;  ///< when takeExpired() will be called

  /// To be called after each change of the calls. Returns whether the table has had no capacity before and has now.
  bool updateCapacity() TORCHRPC_REQUIRES(mutex_) {
    const bool is_full = !closed_ && (calls_.size() >= kMaxCalls || bytes_ >= kMaxBytes);
    const bool was_full = is_full_.load(std::memory_order_relaxed);
    if (is_full != was_full) is_full_.store(is_full, std::memory_order_relaxed);
    return was_full && !is_full;
  }
  static bool isFrom(const ClientCall& call, PeerId from) { return call.link != 0 && call.callee == from; }
  std::optional<ClientCall> takeLocked(CallId id) TORCHRPC_REQUIRES(mutex_);
  ClientCall takeAt(Calls::iterator it) TORCHRPC_REQUIRES(mutex_);
  void addDeadline(TimePoint deadline, CallId id) TORCHRPC_REQUIRES(mutex_);
  /// Takes the earliest deadline off the heap.
  std::pair<TimePoint, CallId> popDeadline() TORCHRPC_REQUIRES(mutex_);
};

}  // namespace torchrpc
