#pragma once

// The contexts that one worker has, its own and those of other owners, and the records of contexts that have ended.
//
// How workers learn that a context has ended: its owner sends a LiveSetSnapshot, the list of its live contexts. All ids
// below `next` that are not listed have ended. Snapshots are ordered and each one is complete, so they may be lost,
// repeated and reordered, and a late message of an ended context does not create the context again. A worker passes
// snapshots on to the workers that it has sent the ended contexts to. Only a snapshot that comes from the owner itself
// ends contexts. After one from another worker, the receiver asks the owner. See README.md. Thread-safe.

#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "autograd/context.h"
#include "base/sync/mutex.h"

namespace torchrpc {

// Note [Lost owners]
// An owner that this worker has lost may be alive: it was stopped for a while, or only the connection broke. Its
// contexts end here, but its later messages, and those of third workers, may refer to contexts that are alive. If such
// a message were served without its context, the gradients would be wrong without an error. So this worker creates the
// context and asks the owner whether it is alive (AutogradService::confirm). If the owner is lost, the new contexts end
// as well.
// A worker that has lost an owner notifies the workers to which it has sent contexts of that owner. A call that it sent
// before may arrive after the notice, and creates a context that the owner may not know. So a worker that has received
// the notice asks the owner whenever a message creates a context of that owner.

/// The list of an owner's contexts that are alive.
struct LiveSetSnapshot {
  WorkerId owner = kNoWorker;
  uint64_t version = 0;
  int64_t next = 0;  ///< counter of the owner's next context
  std::set<ContextId> alive;

  /// The version that marks a notice in place of a snapshot: its sender has lost the owner, so the receiver should ask
  /// the owner.
  static constexpr uint64_t kOwnerLost = ~uint64_t{0};

  /// Orders the snapshots of one owner: later ones, also those of a later start, are greater.
  std::pair<int64_t, uint64_t> order() const { return {next, version}; }
  bool hasEnded(ContextId id) const { return (id & kLargestCounter) < next && !alive.contains(id); }
};

class ContextTable {
 public:
  /// `first`: the first counter value of this worker's ids.
  explicit ContextTable(WorkerId self, int64_t first = 1) : self_(self), next_context_(first), next_message_(first) {}

  /// Throws Error(kShutdown) after close().
  ContextPtr create();
  /// Returns the context of that id, or null.
  ContextPtr find(ContextId id) const;
  /// Returns the context that a message of another worker names; creates it if it is new. Null if it has ended.
  ContextPtr findOrCreate(ContextId id);
  /// Whether the owner must be asked if it is alive: see Note [Lost owners].
  bool mustConfirm(WorkerId owner) const;
  /// Records that the owner has answered.
  void onOwnerConfirmed(WorkerId owner);
  /// Removes and returns a context; null if there is none. The caller calls its end(). A later message may create a
  /// context of another owner again.
  ContextPtr remove(ContextId id);
  ContextId largestId() const { return makeAutogradId(self_, kLargestCounter); }
  MessageId newMessageId();
  PassId newPassId() { return newMessageId(); }
  size_t size() const;
  std::vector<ContextPtr> all() const;

  // --- live-set snapshots ---

  /// Schedules a snapshot of `owner`'s contexts, if this worker has one, for these workers. `is_lost`: schedules, in
  /// place of the snapshot, the notice that this worker has lost the owner, even if the owner has answered since.
  void scheduleSnapshot(WorkerId owner, const std::set<WorkerId>& workers, bool is_lost = false);
  /// Returns the snapshots that are scheduled for `worker`, as bytes for the next message to it; empty if none.
  /// Afterwards they are no longer scheduled.
  std::string takeScheduledSnapshots(WorkerId worker);
  /// Schedules again the snapshots of a message that was not delivered.
  void rescheduleSnapshots(WorkerId worker, std::string_view snapshots);
  std::vector<WorkerId> workersWithScheduledSnapshots() const;
  struct Applied {
    std::vector<ContextPtr> ended;   ///< removed from the table
    std::vector<WorkerId> to_ask;    ///< owners of contexts here that have ended according to another worker
    std::vector<WorkerId> doubtful;  ///< owners that the sender has lost and that have contexts here
  };
  /// Applies the snapshots in a message of `from`. Throws Error(kProtocol) for malformed bytes.
  Applied applySnapshots(std::string_view snapshots, WorkerId from);
  /// Removes and returns all contexts of worker `id`, which is lost.
  std::vector<ContextPtr> removeAllOf(WorkerId id);
  /// A worker has joined under this id. Removes and returns the contexts of its earlier starts, whose counters
  /// are below `first`; later messages do not create them again. Returns nullopt if `first` is known already.
  std::optional<std::vector<ContextPtr>> onWorkerJoined(WorkerId id, int64_t first);
  /// Empties the table and returns its contexts. From then on no context is created.
  std::vector<ContextPtr> close();

 private:
  LiveSetSnapshot ownSnapshot() const TORCHRPC_REQUIRES(mutex_);
  void schedule(WorkerId owner, WorkerId receiver, bool is_lost) TORCHRPC_REQUIRES(mutex_);
  bool hasEnded(ContextId id) const TORCHRPC_REQUIRES(mutex_);
  std::vector<ContextPtr> removeEnded(const LiveSetSnapshot& snapshot) TORCHRPC_REQUIRES(mutex_);
  bool hasContextOf(WorkerId owner) const TORCHRPC_REQUIRES(mutex_);
  /// Records a snapshot that another worker has passed on. Returns true if the owner has to be asked.
  bool hearOf(const LiveSetSnapshot& snapshot) TORCHRPC_REQUIRES(mutex_);

  const WorkerId self_;
  mutable Mutex mutex_;
  bool closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
  std::unordered_map<ContextId, ContextPtr> contexts_ TORCHRPC_GUARDED_BY(mutex_);
  int64_t next_context_ TORCHRPC_GUARDED_BY(mutex_);
  int64_t next_message_ TORCHRPC_GUARDED_BY(mutex_);
  uint64_t version_ TORCHRPC_GUARDED_BY(mutex_) = 0;  ///< of the own snapshot: counts own contexts that have ended
  std::map<WorkerId, LiveSetSnapshot> latest_snapshots_ TORCHRPC_GUARDED_BY(mutex_);  ///< by owner, except this worker
  /// By owner: contexts with lower counters may have ended, according to other workers. Erased when a snapshot of the
  /// owner itself reaches this counter.
  std::map<WorkerId, int64_t> heard_next_ TORCHRPC_GUARDED_BY(mutex_);
  std::map<WorkerId, int64_t> first_contexts_ TORCHRPC_GUARDED_BY(mutex_);  ///< see onWorkerJoined()
  // See Note [Lost owners].
  std::set<WorkerId> lost_owners_ TORCHRPC_GUARDED_BY(mutex_);         ///< lost by this worker, not confirmed since
  std::set<WorkerId> lost_elsewhere_ TORCHRPC_GUARDED_BY(mutex_);      ///< lost by another worker that sends contexts
  std::set<WorkerId> unconfirmed_owners_ TORCHRPC_GUARDED_BY(mutex_);  ///< with a new context that may have ended
  /// receiver -> owners whose snapshots it will be sent; true: the notice that this worker has lost the owner instead
  std::map<WorkerId, std::map<WorkerId, bool>> scheduled_snapshots_ TORCHRPC_GUARDED_BY(mutex_);
  /// Whether there may be scheduled snapshots: set with the mutex. Without them a message does not take the mutex.
  std::atomic<bool> has_scheduled_{false};
};

}  // namespace torchrpc
