#pragma once

// Which one of the waiting threads is the leader, which parks on the wait words of the rings: see Note
// [Leader/Followers] in event_loop.cpp.
// Threads: any. A thread is known by the FutexWaiter on which it parks.

#include <atomic>

#include "base/sync/futex_waiter.h"
#include "base/sync/mutex.h"

namespace torchrpc::native {

class Leader {
 public:
  /// Makes the thread of `waiter` the leader, and wakes the one that it replaces. False if there is a leader that is
  /// not preemptible.
  bool tryLead(FutexWaiter& waiter, bool preemptible);
  /// Ends its lead: must be called before the waiter is destroyed. False if another thread has replaced it, or if it
  /// never led.
  bool resign(const FutexWaiter& waiter);
  bool is(const FutexWaiter& waiter) const { return waiter_.load() == &waiter; }
  bool exists() const { return waiter_.load() != nullptr; }

 private:
  std::atomic<FutexWaiter*> waiter_{nullptr};  ///< of the leader; changed with mutex_

  // Guarded by mutex_.
  Mutex mutex_;
  bool preemptible_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

}  // namespace torchrpc::native
