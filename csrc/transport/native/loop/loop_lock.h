#pragma once

// The mutex for all work "on the loop" with rings and frames. It is not a leaf lock: handlers run while it is held. The
// loop thread has priority over threads that poll in its place.
// Threads: any.
//
// Note [Unlock, then look]
// A thread that has armed the connections for the leader releases the lock, and then reads whether the leader still
// exists. A leader that leaves resigns, and then tries to acquire the lock. At least one of the two threads must see
// the other's write; otherwise neither arms the connections again, and a message wakes no thread. The mutex alone does
// not guarantee that: unlocking is a release operation, so a later read may be reordered before it; locking is an
// acquire operation, so it may be reordered before an earlier write. (On x86 both use instructions that are full
// fences.) C++ guarantees the order only with a sequentially consistent fence between the write and the read of each
// thread: unlockAndFence(), fenceAndTryLock(). This relies on glibc's try_lock, which never fails on a free mutex.

#include <atomic>
#include <functional>
#include <mutex>

#include "base/sync/mutex.h"
#include "base/timer.h"
#include "transport/native/loop/spin_backoff.h"

namespace torchrpc::native {

class TORCHRPC_ANNOTATE(capability("loop lock")) LoopLock {
 public:
  /// For the loop thread. While it waits here, tryLockFor() does not acquire the lock.
  void lockFromLoopThread() TORCHRPC_ANNOTATE(acquire_capability());
  /// For threads that need the lock for a moment.
  void lock() TORCHRPC_ANNOTATE(acquire_capability()) { mutex_.lock(); }
  bool try_lock() TORCHRPC_ANNOTATE(try_acquire_capability(true)) { return mutex_.try_lock(); }
  /// For threads that are going to poll: waits for the lock without sleeping. Returns false, without the lock, if
  /// `done()` is true, after `limit`, or if `backoff` finds that another thread needs the core.
  bool tryLockFor(Duration limit, const std::function<bool()>& done, SpinBackoff& backoff)
      TORCHRPC_ANNOTATE(try_acquire_capability(true));
  void unlock() TORCHRPC_ANNOTATE(release_capability()) { mutex_.unlock(); }
  /// For a thread that afterwards reads state that other threads write before fenceAndTryLock().
  void unlockAndFence() TORCHRPC_ANNOTATE(release_capability()) {
    mutex_.unlock();
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  /// For a thread that has written, or read, state that other threads read after unlockAndFence().
  bool fenceAndTryLock() TORCHRPC_ANNOTATE(try_acquire_capability(true)) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return mutex_.try_lock();
  }

  /// Tells clang's thread-safety analysis that this thread holds the lock, where it cannot see that.
  void assertHeld() const TORCHRPC_ANNOTATE(assert_capability(this)) {}

 private:
  std::mutex mutex_;
  std::atomic<bool> loop_thread_waits_{false};
};

}  // namespace torchrpc::native
