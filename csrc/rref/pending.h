#pragma once

// Asynchronous waits for owners: Confirmation waits until the RRefs of a message are confirmed, PendingFetch for a
// fetched value. Each calls `done` once. Threads: any. The thread of the last event calls it, under no lock.

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "calls/messenger.h"
#include "rref/rref.h"

namespace torchrpc {

/// Calls `done` with the RRefs of a message when each is confirmed, or with the first failure when none is pending.
class Confirmation : public std::enable_shared_from_this<Confirmation> {
 public:
  using Done = std::function<void(Result<std::vector<RRefPtr>>)>;

  Confirmation(std::vector<RRefPtr> rrefs, Done done)
      : unanswered_(rrefs.size()), rrefs_(std::move(rrefs)), done_(std::move(done)) {}

  void start() {
    const auto rrefs = rrefs_;  // the last answer moves the member away
    if (rrefs.empty()) return done_(rrefs);
    for (const auto& rref : rrefs) {
      auto user = std::dynamic_pointer_cast<UserRRef>(rref);
      if (!user) {
        onAnswer(std::nullopt);
      } else {
        user->whenConfirmed([self = shared_from_this()](const Status& failure) { self->onAnswer(failure); });
      }
    }
  }

 private:
  void onAnswer(const Status& failure) {
    Status first_failure;
    {
      MutexLock lock(mutex_);
      if (failure && !failure_) failure_ = failure;
      if (--unanswered_ > 0) return;
      first_failure = std::move(failure_);
    }
    if (first_failure) return done_(*first_failure);
    done_(std::move(rrefs_));
  }

  Mutex mutex_;
  size_t unanswered_ TORCHRPC_GUARDED_BY(mutex_);
  Status failure_ TORCHRPC_GUARDED_BY(mutex_);
  // constant until the last answer, then used by its thread only:
  std::vector<RRefPtr> rrefs_;
  const Done done_;
};

/// A fetch under way. It ends with the owner's reply or with the failure of its RRef, whichever comes first. Until then
/// it keeps the user alive, so that the owner cannot drop the value; it releases a user that has failed.
class PendingFetch {
 public:
  PendingFetch(std::shared_ptr<UserRRef> rref, Messenger::ReplyHandler done)
      : rref_(std::move(rref)), done_(std::move(done)) {}

  /// Ends the fetch with `reply`. Returns false, with `reply` unchanged, if the fetch had ended before.
  bool complete(Result<Message>&& reply) {
    if (ended_.exchange(true)) return false;
    const auto rref = std::move(rref_);
    const auto done = std::move(done_);
    done(std::move(reply));
    return true;
  }

 private:
  std::atomic<bool> ended_{false};
  // used by the thread that sets ended_:
  std::shared_ptr<UserRRef> rref_;
  Messenger::ReplyHandler done_;
};

}  // namespace torchrpc
