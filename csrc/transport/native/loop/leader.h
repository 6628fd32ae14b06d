#pragma once

// Records which of the waiting threads is the leader, which parks on the wait words of the rings: see Note
// [Leader/Followers] in event_loop.cpp.
// Threads: any. The FutexWaiter on which a thread parks identifies the thread.

#include <atomic>

#include "base/sync/futex_waiter.h"
#include "base/sync/mutex.h"

namespace torchrpc::native {

class Leader {
 public:
  /// Makes the thread of `waiter` the leader, and wakes the leader that it replaces. Returns false if the present
  /// leader is not preemptible.
  bool tryLead(FutexWaiter& waiter, bool preemptible);
  /// Ends the lead of the thread of `waiter`; must be called before the waiter is destroyed. Returns false if that
  /// thread is not the leader, because it was replaced or never led.
  bool resign(const FutexWaiter& waiter);
  bool is(const FutexWaiter& waiter) const { return waiter_.load() == &waiter; }
  bool exists() const { return waiter_.load() != nullptr; }

 private:
  std::atomic<FutexWaiter*> waiter_{nullptr};  ///< of the leader; set with mutex_, reset without

  // Guarded by mutex_.
  Mutex mutex_;
  bool preemptible_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

}  // namespace torchrpc::native
