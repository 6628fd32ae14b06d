#pragma once

// Calls under way: who is to hear of each reply. Whoever takes an entry out completes it, exactly once; what comes
// later for that id is late or repeated, and is counted, not asserted.

#include <atomic>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "agent/activity.h"
#include "agent/messenger.h"
#include "base/sync/mutex.h"

namespace torchrpc {

class CallTable {
 public:
  struct Call {
    WorkerId to = kNoWorker;
    uint64_t link = 0;  ///< the connection it went out on; 0: none yet, or none needed
    Duration timeout{0};
    TimePoint deadline = kNever;
    size_t bytes = 0;     ///< roughly, of the request
    ActivityToken token;  ///< until the handler has gone
    Messenger::ReplyHandler handler;
  };

  /// Ids are handed out before the call is registered, so that its frame can be made first.
  CallId nextId() { return next_id_.fetch_add(1, std::memory_order_relaxed); }

  /// False, leaving `call` untouched, once closed. `wake` tells whether takeExpired() must now be called at its
  /// deadline, because it has not been asked for by then: not for every call, most of which end long before.
  bool add(CallId id, Call& call, bool& wake);
  /// The call has been given to that connection; false if it is no longer there.
  bool assign(CallId id, uint64_t link);
  std::optional<Call> take(CallId id);
  /// Those that went out on a connection that is gone.
  std::vector<Call> takeLink(uint64_t link);
  /// Those whose deadline has passed; `next` is set to when it must be called again (kNever: not for these).
  std::vector<Call> takeExpired(TimePoint now, TimePoint& next);
  /// All of them; no more are taken in.
  std::vector<Call> close();

  size_t size() const;
  /// Whether there are few enough calls for another one, waited for so long at most.
  bool awaitRoom(Duration patience);
  /// Adds the workers whose replies are awaited.
  void addAwaited(std::set<WorkerId>& workers) const;

 private:
  // Enough for any network to be busy, and little enough to be kept by callees that are slow.
  static constexpr size_t kMostCalls = 1 << 14;
  static constexpr size_t kMostBytes = size_t{1} << 30;

  std::atomic<CallId> next_id_{1};
  mutable Mutex mutex_;
  CondVar room_;
  // guarded by mutex_:
  bool closed_ = false;
  std::unordered_map<CallId, Call> calls_;
  std::vector<std::pair<TimePoint, CallId>> deadlines_;  ///< a heap, the next first; of calls that have ended, too
  size_t bytes_ = 0;                                     ///< of all calls
  TimePoint wake_at_ = kNever;                           ///< when takeExpired() will be called

  bool hasRoom() const TORCHRPC_REQUIRES(mutex_) {
    return closed_ || (calls_.size() < kMostCalls && bytes_ < kMostBytes);
  }
  std::optional<Call> takeLocked(CallId id) TORCHRPC_REQUIRES(mutex_);
  void addDeadline(TimePoint deadline, CallId id) TORCHRPC_REQUIRES(mutex_);
  /// Takes the next deadline off.
  std::pair<TimePoint, CallId> popDeadline() TORCHRPC_REQUIRES(mutex_);
};

}  // namespace torchrpc
