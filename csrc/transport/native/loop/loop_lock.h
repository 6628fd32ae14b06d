#pragma once

// The mutex of everything that is done "on the loop" for rings and frames. It is no leaf lock: handlers are called with
// it. The loop thread has priority over threads that poll in its stead.
// Threads: any.

#include <atomic>
#include <functional>
#include <mutex>

#include "base/sync/mutex.h"
#include "base/timer.h"
#include "transport/native/loop/spin_backoff.h"

namespace torchrpc::native {

class TORCHRPC_ANNOTATE(capability("loop lock")) LoopLock {
 public:
  /// For the loop thread: until it has the lock, tryLockFor() does not take it.
  void lockFromLoopThread() TORCHRPC_ANNOTATE(acquire_capability());
  /// For threads that need the lock for a moment.
  void lock() TORCHRPC_ANNOTATE(acquire_capability()) { mutex_.lock(); }
  bool try_lock() TORCHRPC_ANNOTATE(try_acquire_capability(true)) { return mutex_.try_lock(); }
  /// For threads that are going to poll: waits for the lock without sleeping. False, without the lock, if `done`, after
  /// `limit`, or if `backoff` finds that the core is needed elsewhere.
  bool tryLockFor(Duration limit, const std::function<bool()>& done, SpinBackoff& backoff)
      TORCHRPC_ANNOTATE(try_acquire_capability(true));
  void unlock() TORCHRPC_ANNOTATE(release_capability()) { mutex_.unlock(); }

  /// For clang's analysis, where it cannot see that this thread has the lock.
  void assertHeld() const TORCHRPC_ANNOTATE(assert_capability(this)) {}

 private:
  std::mutex mutex_;
  std::atomic<bool> loop_thread_waits_{false};
};

}  // namespace torchrpc::native
