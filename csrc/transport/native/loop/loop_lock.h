#pragma once

// The mutex of everything that is done "on the loop" for rings and frames. It is no leaf lock: handlers are called with
// it. The loop thread has priority over threads that poll in its stead.
// Threads: any.
//
// Note [Unlock, then look]
// A thread that has armed the connections for the leader releases the lock, and then looks whether the leader is still
// there. A leader that leaves says so, and then looks whether the lock is free. At least one of the two must see what
// the other has done, or nobody arms the connections again and a message wakes no thread. The order of a mutex is not
// enough for that: unlocking is a release operation, and a read that follows it may come first; taking a mutex is an
// acquire operation, and may come before a write that precedes it. On x86 the instructions of both are full fences all
// the same. C++ promises that only with a sequentially consistent fence between the write and the read of each thread:
// unlockAndFence(), fenceAndTryLock(). (glibc's try_lock does not fail while its mutex is free.)

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
  /// For a thread that then reads what others write before fenceAndTryLock().
  void unlockAndFence() TORCHRPC_ANNOTATE(release_capability()) {
    mutex_.unlock();
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  /// For a thread that has written, or read, what others read after unlockAndFence().
  bool fenceAndTryLock() TORCHRPC_ANNOTATE(try_acquire_capability(true)) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return mutex_.try_lock();
  }

  /// For clang's analysis, where it cannot see that this thread has the lock.
  void assertHeld() const TORCHRPC_ANNOTATE(assert_capability(this)) {}

 private:
  std::mutex mutex_;
  std::atomic<bool> loop_thread_waits_{false};
};

}  // namespace torchrpc::native
