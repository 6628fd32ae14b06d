#pragma once

// The calls by which this worker makes restorable values again.
// Threads: any.

#include <map>
#include <optional>

#include "base/sync/mutex.h"
#include "base/timer.h"
#include "rref/rref.h"
#include "wire/message.h"

namespace torchrpc {

// Note [Restoring RRefs]
// The creator of a restorable RRef keeps a copy of the call that made the value. When the owner has been started again,
// the creator sends that call to the later one, with the ids and the creation number of the first call. The new
// owner has not seen this number, so it runs the call. All other holders register their forks there again, under
// new numbers; as always, a registration may arrive before the call. So the ids and the RRefs of the program stay the
// same. If the creator has ended or has dropped its RRef, the value stays lost: a holder gives up after the time-out of
// the group's calls.
class Recipes {
 public:
  struct Recipe {
    Message call;
    Duration timeout;
  };

  /// Keeps a copy of the call, tensors included.
  void add(const RRefId& id, const Message& call, Duration timeout) {
    MutexLock lock(mutex_);
    recipes_.emplace(id, Recipe{copyMessage(call), timeout});
  }

  std::optional<Recipe> find(const RRefId& id) const {
    MutexLock lock(mutex_);
    const auto found = recipes_.find(id);
    return found == recipes_.end() ? std::nullopt : std::optional(found->second);
  }

  /// The creator has dropped its RRef. `user` may also be another RRef with the same id.
  void forget(const UserRRef& user) {
    if (!isRestorable(user.id()) || user.numbers().registration != user.numbers().creation) return;
    std::map<RRefId, Recipe>::node_type dropped;  // destroyed after the lock
    MutexLock lock(mutex_);
    dropped = recipes_.extract(user.id());
  }

 private:
  mutable Mutex mutex_;
  std::map<RRefId, Recipe> recipes_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
