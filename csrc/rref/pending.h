#pragma once

// What waits for the owners of users: a message whose RRefs are to be confirmed, a fetch. Each ends once.
// Threads: any; the last event to come ends it, on its thread, under no lock.

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "agent/messenger.h"
#include "rref/rref.h"

namespace torchrpc {

/// Calls `done` with the RRefs of a message when the owner of each has answered.
class Confirmation : public std::enable_shared_from_this<Confirmation> {
 public:
  using Done = std::function<void(Result<std::vector<RRefPtr>>)>;

  Confirmation(std::vector<RRefPtr> rrefs, Done done)
      : waiting_(rrefs.size()), rrefs_(std::move(rrefs)), done_(std::move(done)) {}

  void start() {
    const auto rrefs = rrefs_;  // the last arrival takes the member away
    if (rrefs.empty()) return done_(rrefs);
    for (const auto& rref : rrefs) {
      auto user = std::dynamic_pointer_cast<UserRRef>(rref);
      if (!user) {
        arrive(std::nullopt);
      } else {
        user->whenConfirmed([self = shared_from_this()](const Status& failure) { self->arrive(failure); });
      }
    }
  }

 private:
  void arrive(const Status& failure) {
    {
      MutexLock lock(mutex_);
      if (failure && !failure_) failure_ = failure;
      if (--waiting_ > 0) return;
    }
    if (failure_) return done_(*failure_);
    done_(std::move(rrefs_));
  }

  Mutex mutex_;
  // guarded by mutex_, constant once nothing is waited for:
  size_t waiting_;
  Status failure_;
  std::vector<RRefPtr> rrefs_;
  Done done_;
};

/// A fetch under way: ends with the owner's reply or with the failure of its RRef, whichever comes first. Until then it
/// keeps the user alive, so that the value cannot go; and not longer, so that a failed user is given up.
class PendingFetch {
 public:
  PendingFetch(std::shared_ptr<UserRRef> rref, Messenger::ReplyHandler done)
      : rref_(std::move(rref)), done_(std::move(done)) {}

  /// False if it has ended before; `reply` is as it was then.
  bool complete(Result<Message>&& reply) {
    if (ended_.exchange(true)) return false;
    const auto rref = std::move(rref_);
    const auto done = std::move(done_);
    done(std::move(reply));
    return true;
  }

 private:
  std::atomic<bool> ended_{false};
  // of whoever has ended it:
  std::shared_ptr<UserRRef> rref_;
  Messenger::ReplyHandler done_;
};

}  // namespace torchrpc
