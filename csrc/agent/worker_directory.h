#pragma once

// Who is in the group and where each can be reached; and how a node learns it, through c10d's Store.
// Lookups come from any thread; the rendezvous blocks, so it belongs to the thread that starts the node.

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "base/sync/mutex.h"
#include "base/timer.h"

namespace c10d {
class Store;
}

namespace torchrpc {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// What a worker publishes of itself.
struct WorkerRecord {
  WorkerInfo info;
  std::string address;       ///< of its transport
  int32_t world_size = 0;    ///< 0: the group grows as workers join
  uint64_t incarnation = 0;  ///< when it started: a restarted worker has another
  std::string metadata;      ///< what else all are to know of it; opaque to the core

  friend bool operator==(const WorkerRecord&, const WorkerRecord&) = default;
};

class WorkerDirectory {
 public:
  explicit WorkerDirectory(WorkerInfo self) : self_(std::move(self)) {}

  const WorkerInfo& self() const { return self_; }
  std::optional<WorkerRecord> find(WorkerId id) const;
  std::optional<WorkerInfo> info(const std::string& name) const;
  /// Of a worker that is not known it is the id, and words for a name.
  WorkerInfo info(WorkerId id) const;
  /// By id.
  std::vector<WorkerInfo> all() const;
  void add(WorkerRecord record);
  void remove(WorkerId id);

 private:
  const WorkerInfo self_;
  mutable Mutex mutex_;
  // guarded by mutex_:
  std::map<WorkerId, WorkerRecord> by_id_;
  std::unordered_map<std::string, WorkerId> by_name_;
};

/// Throws Error(kInvalidArgument) for a name that cannot be a worker's.
void validateName(const std::string& name);
/// Throws Error(kInvalidArgument) for a name, rank or world size that cannot be.
void validateSelf(const WorkerInfo& self, int32_t world_size);

/// The meeting of a group at a Store. Every method throws Error(kRendezvous) naming who is missing or in conflict, and
/// what to do. Not thread-safe.
class Rendezvous {
 public:
  Rendezvous(StorePtr store, WorkerRecord self);

  /// Which of these workers are lost, and need not be waited for.
  using LostAmong = std::function<std::vector<WorkerId>(const std::vector<WorkerId>&)>;

  /// Static group: publishes this worker, reads the others, checks that names are unique and world sizes agree.
  /// Logs whom it waits for, once, if that takes long.
  std::vector<WorkerRecord> meetAll(Duration timeout);

  /// Group that grows: publishes this worker, reads those already there. The caller keeps joins apart from each other.
  /// A worker of the same name or id that does not live (`lives`) any more is taken to be this one, before it was
  /// started again.
  std::vector<WorkerRecord> joinGroup(Duration timeout, const std::function<bool(const WorkerRecord&)>& lives);
  void leaveGroup();
  /// The record of one member, after it has joined.
  WorkerRecord lookUp(WorkerId id, Duration timeout);

  /// Returns once all workers of a static group have called it for this `name`; the sum of their numbers. Without
  /// those that are lost (`lost` may be empty: nobody is), which are added to `absent`.
  /// `timeout` 0: waits as long as it takes.
  int64_t sumOverAll(
      const std::string& name, int64_t number, Duration timeout, const LostAmong& lost, std::set<WorkerId>& absent);

  /// To be called by all when they have read what they need of one `phase`, each of which has a name of its own.
  /// Worker 0, whose process often serves the store and may end next, returns only when the others have called it (or
  /// after `timeout`).
  void releaseStore(const std::string& phase, Duration timeout);

 private:
  WorkerRecord read(WorkerId id);
  void claimKindOfGroup();
  void claimRank();
  /// Waits for the keys "<prefix><rank>" of these ranks; the error says who is missing, and `what` they have not done.
  /// Gives those that are lost.
  std::vector<WorkerId> waitFor(
      const std::vector<WorkerId>& ranks, const std::string& prefix, Duration timeout, const std::string& what,
      const LostAmong& lost = {});
  /// Those of the ranks that have no such key; nothing if the store does not answer.
  std::optional<std::vector<WorkerId>> missing(const std::vector<WorkerId>& ranks, const std::string& prefix) const;
  Error storeLost(const std::exception& cause) const;

  const StorePtr store_;
  const WorkerRecord self_;
};

}  // namespace torchrpc
