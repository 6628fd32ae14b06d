#pragma once

// std::mutex with clang's thread-safety annotations (no-ops under g++).
// All mutexes here are leaf locks: nothing is called out, completed or destroyed while one is held.
// What is waited for often is notified once the lock is released: a woken thread may take the notifier's core at once,
// and would find the mutex held.

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

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

/// std::condition_variable. (The one for any lock has a mutex of its own, which it holds while it notifies.)
class CondVar {
 public:
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

  template <typename... Over>
  void wait(MutexLock& lock, Over... over) {
    condition_.wait(lock.lock_, std::move(over)...);
  }
  template <typename... Over>
  auto wait_for(MutexLock& lock, std::chrono::nanoseconds patience, Over... over) {
    return condition_.wait_for(lock.lock_, patience, std::move(over)...);
  }
  template <typename... Over>
  auto wait_until(MutexLock& lock, std::chrono::steady_clock::time_point deadline, Over... over) {
    return condition_.wait_until(lock.lock_, deadline, std::move(over)...);
  }

 private:
  std::condition_variable condition_;
};

}  // namespace torchrpc
