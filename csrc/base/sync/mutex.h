#pragma once

// std::mutex with clang's thread-safety annotations (no-ops under g++).
// Mutexes are leaf locks: while a thread holds one, it calls no callback, completes nothing and destroys nothing
// (csrc/README.md lists the exceptions).
// Frequent notifications are sent after the lock is released: a woken thread may preempt the notifying thread at once,
// and would find the mutex locked.

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/timer.h"

#if defined(__clang__)
#define TORCHRPC_ANNOTATE(x) __attribute__((x))
#else
#define TORCHRPC_ANNOTATE(x)
#endif

#define TORCHRPC_GUARDED_BY(m) TORCHRPC_ANNOTATE(guarded_by(m))
#define TORCHRPC_REQUIRES(m) TORCHRPC_ANNOTATE(requires_capability(m))
#define TORCHRPC_EXCLUDES(m) TORCHRPC_ANNOTATE(locks_excluded(m))

namespace torchrpc {

class TORCHRPC_ANNOTATE(capability("mutex")) Mutex {
 public:
  void lock() TORCHRPC_ANNOTATE(acquire_capability()) { mutex_.lock(); }
  void unlock() TORCHRPC_ANNOTATE(release_capability()) { mutex_.unlock(); }
  bool try_lock() TORCHRPC_ANNOTATE(try_acquire_capability(true)) { return mutex_.try_lock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

/// Scoped lock.
class TORCHRPC_ANNOTATE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) TORCHRPC_ANNOTATE(acquire_capability(mutex)) : lock_(mutex.mutex_) {}
  ~MutexLock() TORCHRPC_ANNOTATE(release_capability()) = default;

  void lock() TORCHRPC_ANNOTATE(acquire_capability()) { lock_.lock(); }
  void unlock() TORCHRPC_ANNOTATE(release_capability()) { lock_.unlock(); }

 private:
  friend class CondVar;
  std::unique_lock<std::mutex> lock_;
};

/// A std::condition_variable. (std::condition_variable_any has a mutex of its own, which it holds while it notifies.)
///
/// A predicate is called with the lock held. A lambda needs an annotation, because clang analyses its body separately:
/// `changed_.wait(lock, [this]() TORCHRPC_REQUIRES(mutex_) { return done_; })`.
class CondVar {
 public:
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

  void wait(MutexLock& lock) { condition_.wait(lock.lock_); }
  std::cv_status wait_for(MutexLock& lock, std::chrono::nanoseconds timeout) {
    return condition_.wait_until(lock.lock_, deadlineAfter(timeout));
  }
  std::cv_status wait_until(MutexLock& lock, std::chrono::steady_clock::time_point deadline) {
    return condition_.wait_until(lock.lock_, deadline);
  }

  // Without the analysis, which cannot name the mutex that a predicate requires.
  template <typename Predicate>
  void wait(MutexLock& lock, Predicate predicate) TORCHRPC_ANNOTATE(no_thread_safety_analysis) {
    condition_.wait(lock.lock_, std::move(predicate));
  }
  template <typename Predicate>
  bool wait_for(MutexLock& lock, std::chrono::nanoseconds timeout, Predicate predicate)
      TORCHRPC_ANNOTATE(no_thread_safety_analysis) {
    return condition_.wait_until(lock.lock_, deadlineAfter(timeout), std::move(predicate));
  }
  template <typename Predicate>
  bool wait_until(MutexLock& lock, std::chrono::steady_clock::time_point deadline, Predicate predicate)
      TORCHRPC_ANNOTATE(no_thread_safety_analysis) {
    return condition_.wait_until(lock.lock_, deadline, std::move(predicate));
  }

 private:
  std::condition_variable condition_;
};

}  // namespace torchrpc
