#pragma once

// Tracks which members of the group this worker can reach, and calls handlers when that changes.
// Threads: any. Handlers run one at a time, on threads of the pool.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "base/executor/executor.h"
#include "base/ids.h"
#include "base/member_change.h"
#include "base/sync/mutex.h"

namespace torchrpc {

class Membership {
 public:
  using Handler = std::function<void(const WorkerInfo&, MemberChange)>;

  /// `pool` must outlive this object.
  explicit Membership(Executor& pool) : pool_(pool) {}

  /// From now on `handler` is called with each change. A handler must not throw.
  void addHandler(Handler handler);
  bool hasHandlers() const;

  // --- events; each change is passed to the handlers once ---
  /// `is_replaced`: an earlier incarnation was known.
  void onJoined(const WorkerInfo& worker, uint64_t incarnation, bool is_replaced);
  /// Called when the connection to that incarnation has ended.
  void onLost(const WorkerInfo& worker, uint64_t incarnation) { onGone(worker, incarnation, MemberChange::kLost); }
  /// Called when that incarnation has announced that it leaves.
  void onLeft(const WorkerInfo& worker, uint64_t incarnation) { onGone(worker, incarnation, MemberChange::kLeft); }
  /// Called when a frame of that incarnation has arrived: if the worker counted as lost, it is back.
  void onActivity(const WorkerInfo& worker, uint64_t incarnation);

  /// Returns those of the workers that have neither been lost nor left.
  std::vector<WorkerInfo> living(std::vector<WorkerInfo> workers) const;

 private:
  enum class State { kPresent, kLost, kLeft };
  struct Member {
    uint64_t incarnation = 0;
    State state = State::kPresent;
  };
  struct Change {
    WorkerInfo worker;
    MemberChange change;
  };
  void onGone(const WorkerInfo& worker, uint64_t incarnation, MemberChange change);
  /// Queues the change. Returns true if the caller must post reportQueued().
  bool enqueue(const WorkerInfo& worker, MemberChange change) TORCHRPC_REQUIRES(mutex_);
  void post();
  void reportQueued();

  Executor& pool_;
  mutable Mutex mutex_;
  std::map<WorkerId, Member> members_ TORCHRPC_GUARDED_BY(mutex_);  ///< the members that have changed
  std::vector<Handler> handlers_ TORCHRPC_GUARDED_BY(mutex_);
  std::deque<Change> queue_ TORCHRPC_GUARDED_BY(mutex_);
  bool is_reporting_ TORCHRPC_GUARDED_BY(mutex_) = false;  ///< reportQueued() is posted or runs
};

}  // namespace torchrpc
