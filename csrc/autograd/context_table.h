#pragma once

// The contexts that one worker has, its own and those of other owners, and what it knows of their ends.
//
// How workers learn that a context has ended: its owner sends a LiveSetSnapshot, the list of its live contexts. All ids
// below `next` that are not listed have ended. Snapshots are ordered and each one is complete, so they may be lost,
// repeated and reordered, and a late message of an ended context creates nothing again. A worker passes snapshots on to
// the workers that it has sent the ended contexts to. Only those that come from the owner itself end a context: others
// are reasons to ask the owner. See README.md. Thread-safe.

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
// A worker that is lost for this one may live: it was stopped for a while, or only the connection broke. Its contexts
// end here, but its later messages, and those of third workers, may refer to contexts that are alive. If such a message
// were served without its context, the backward pass would be wrong in silence. So the context is created, and the
// owner is asked whether it lives (AutogradService::confirm). If it is lost indeed, the new contexts end as well.
// A worker that has lost an owner says so to those that it has sent contexts of that owner. A call that it sent before
// may arrive later, and creates a context of which the owner may not know. So the receiver of that news asks the owner
// whenever another worker brings it a new context of that owner.

/// Which contexts of one owner are alive.
struct LiveSetSnapshot {
  WorkerId owner = kNoWorker;
  uint64_t version = 0;
  int64_t next = 0;  ///< counter of the owner's next context
  std::set<ContextId> alive;

  /// The version of what a worker passes on that has lost the owner: not a snapshot, but a reason to ask the owner.
  static constexpr uint64_t kOwnerLost = ~uint64_t{0};

  /// A later snapshot of the owner, or of a later incarnation, is greater.
  std::pair<int64_t, uint64_t> order() const { return {next, version}; }
  bool hasEnded(ContextId id) const { return (id & kLargestCounter) < next && !alive.contains(id); }
};

class ContextTable {
 public:
  /// `first`: the first counter value of this worker's ids.
  explicit ContextTable(WorkerId self, int64_t first = 1) : self_(self), next_context_(first), next_message_(first) {}

  /// Throws Error(kShutdown) after close().
  ContextPtr create();
  /// Null if there is none.
  ContextPtr find(ContextId id) const;
  /// The context that a message of another worker names, created if it is new; null if it has ended.
  ContextPtr findOrCreate(ContextId id);
  /// Whether the owner must be asked whether it lives: see Note [Lost owners].
  bool mustConfirm(WorkerId owner) const;
  /// The owner has answered.
  void onOwnerConfirmed(WorkerId owner);
  /// Removes and returns a context; null if there is none. The caller calls its end(). A context of another owner may
  /// be created again by a later message.
  ContextPtr remove(ContextId id);
  ContextId largestId() const { return makeAutogradId(self_, kLargestCounter); }
  MessageId newMessageId();
  PassId newPassId() { return newMessageId(); }
  size_t size() const;
  std::vector<ContextPtr> all() const;

  // --- live-set snapshots ---

  /// Schedules a snapshot of `owner`'s contexts, if there is one yet, for these workers.
  /// `is_lost`: instead of it the news that this worker has lost the owner, even if that has answered since.
  void scheduleSnapshot(WorkerId owner, const std::set<WorkerId>& workers, bool is_lost = false);
  /// The snapshots that are scheduled for `worker`, as bytes for the next message to it; empty if none. They are no
  /// longer scheduled afterwards.
  std::string takeScheduledSnapshots(WorkerId worker);
  /// That message was not delivered: schedules its snapshots again.
  void rescheduleSnapshots(WorkerId worker, std::string_view snapshots);
  std::vector<WorkerId> workersWithScheduledSnapshots() const;
  struct Applied {
    std::vector<ContextPtr> ended;   ///< they have been removed
    std::vector<WorkerId> to_ask;    ///< owners whose contexts here have ended, as another worker says
    std::vector<WorkerId> doubtful;  ///< owners that the sender has lost, and of which there are contexts here
  };
  /// Applies the snapshots of a message of `from`. Throws Error(kProtocol).
  Applied applySnapshots(std::string_view snapshots, WorkerId from);
  /// Worker `id` is lost, and with it all its contexts, which are removed and returned.
  std::vector<ContextPtr> removeAllOf(WorkerId id);
  /// A worker has joined under this id. Those contexts of its earlier incarnations that are still here, whose counters
  /// are below `first`, are removed and returned, and are not created again. nullopt if this is known already.
  std::optional<std::vector<ContextPtr>> onWorkerJoined(WorkerId id, int64_t first);
  /// Empties the table and rejects new contexts from now on.
  std::vector<ContextPtr> close();

 private:
  LiveSetSnapshot ownSnapshot() const TORCHRPC_REQUIRES(mutex_);
  void schedule(WorkerId owner, WorkerId receiver, bool is_lost) TORCHRPC_REQUIRES(mutex_);
  bool hasEnded(ContextId id) const TORCHRPC_REQUIRES(mutex_);
  std::vector<ContextPtr> removeEnded(const LiveSetSnapshot& snapshot) TORCHRPC_REQUIRES(mutex_);
  bool hasContextOf(WorkerId owner) const TORCHRPC_REQUIRES(mutex_);
  /// Another worker passes on this snapshot. True if the owner has to be asked.
  bool hearOf(const LiveSetSnapshot& snapshot) TORCHRPC_REQUIRES(mutex_);

  const WorkerId self_;
  mutable Mutex mutex_;
  bool closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
  std::unordered_map<ContextId, ContextPtr> contexts_ TORCHRPC_GUARDED_BY(mutex_);
  int64_t next_context_ TORCHRPC_GUARDED_BY(mutex_);
  int64_t next_message_ TORCHRPC_GUARDED_BY(mutex_);
  uint64_t version_ TORCHRPC_GUARDED_BY(mutex_) = 0;  ///< of the own snapshot: how many own contexts have ended
  std::map<WorkerId, LiveSetSnapshot> latest_snapshots_ TORCHRPC_GUARDED_BY(mutex_);  ///< by owner, without this worker
  /// By owner, the counter below which contexts may have ended, as other workers say; until the owner says as much.
  std::map<WorkerId, int64_t> heard_next_ TORCHRPC_GUARDED_BY(mutex_);
  std::map<WorkerId, int64_t> first_contexts_ TORCHRPC_GUARDED_BY(mutex_);  ///< see onWorkerJoined()
  // See Note [Lost owners].
  std::set<WorkerId> lost_owners_ TORCHRPC_GUARDED_BY(mutex_);         ///< for this worker, and not confirmed since
  std::set<WorkerId> lost_elsewhere_ TORCHRPC_GUARDED_BY(mutex_);      ///< for another worker that sends contexts
  std::set<WorkerId> unconfirmed_owners_ TORCHRPC_GUARDED_BY(mutex_);  ///< of these, with a new context
  /// receiver -> owners whose snapshots it is to receive; true: it is to learn that this worker has lost the owner
  std::map<WorkerId, std::map<WorkerId, bool>> scheduled_snapshots_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
