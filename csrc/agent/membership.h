#pragma once

// Which members of the group this worker can reach, and who is told when that changes.
// Threads: any. Handlers run one at a time, on threads of the pool.

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "base/executor/executor.h"
#include "base/executor/strand.h"
#include "base/ids.h"
#include "base/member_change.h"
#include "base/sync/mutex.h"

namespace torchrpc {

class Membership {
 public:
  using Handler = std::function<void(const WorkerInfo&, MemberChange)>;

  /// `pool` must outlive it.
  explicit Membership(Executor& pool) : strand_(pool, {}) {}

  /// From now on `handler` is called with each change. A handler must not throw.
  void addHandler(Handler handler);
  bool hasHandlers() const;

  // --- what this worker learns; each change is reported once ---
  /// `is_replaced`: an incarnation before this one was known.
  void onJoined(const WorkerInfo& worker, bool is_replaced);
  /// The connection to that incarnation has ended.
  void onLost(const WorkerInfo& worker, uint64_t incarnation) { onGone(worker, incarnation, MemberChange::kLost); }
  /// It has said that it leaves.
  void onLeft(const WorkerInfo& worker, uint64_t incarnation) { onGone(worker, incarnation, MemberChange::kLeft); }
  /// A frame of that incarnation has arrived: if it counted as lost, it is back.
  void onActivity(const WorkerInfo& worker, uint64_t incarnation);

  /// Those of the workers that have neither been lost nor left.
  std::vector<WorkerInfo> living(std::vector<WorkerInfo> workers) const;

 private:
  struct Gone {
    uint64_t incarnation = 0;
    bool has_left = false;
  };
  void onGone(const WorkerInfo& worker, uint64_t incarnation, MemberChange change);
  void report(const WorkerInfo& worker, MemberChange change);

  Strand strand_;
  mutable Mutex mutex_;
  std::map<WorkerId, Gone> gone_ TORCHRPC_GUARDED_BY(mutex_);
  std::vector<Handler> handlers_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
