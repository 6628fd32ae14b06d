#pragma once

// Tracks which members of the group this worker can reach, and calls handlers when that changes.
// Threads: any. Handlers run one at a time, on threads of the pool.

#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "base/executor/executor.h"
#include "base/ids.h"
#include "base/member_change.h"
#include "base/sync/mutex.h"
#include "peers/peer.h"

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
  /// `is_replaced`: an earlier start of the worker was known.
  void onJoined(const Peer& peer, bool is_replaced);
  /// Called when the connection to the peer has ended.
  void onLost(const Peer& peer) { onGone(peer, MemberChange::kLost); }
  /// Called when the peer has announced that it leaves.
  void onLeft(const Peer& peer) { onGone(peer, MemberChange::kLeft); }
  /// Called when a frame of the peer has arrived: if it counted as lost, it is back.
  void onActivity(const Peer& peer);

  /// Returns those of the workers that have neither been lost nor left.
  std::vector<WorkerInfo> living(std::vector<WorkerInfo> workers) const;

 private:
  enum class State { kPresent, kLost, kLeft };
  struct Member {
    PeerId latest;
    State state = State::kPresent;
  };
  struct Change {
    WorkerInfo worker;
    MemberChange change;
  };
  void onGone(const Peer& peer, MemberChange change);
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
