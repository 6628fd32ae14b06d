#pragma once

// std::mutex with clang's thread-safety annotations (no-ops under g++).
// All mutexes here are leaf locks: nothing is called out, completed or destroyed while one is held.

#include <condition_variable>
#include <mutex>

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
  std::mutex mutex_;
};

/// Scoped lock; also a BasicLockable, for CondVar::wait.
class TORCHRPC_ANNOTATE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) TORCHRPC_ANNOTATE(acquire_capability(mutex)) : lock_(mutex) {}
  ~MutexLock() TORCHRPC_ANNOTATE(release_capability()) = default;

  void lock() TORCHRPC_ANNOTATE(acquire_capability()) { lock_.lock(); }
  void unlock() TORCHRPC_ANNOTATE(release_capability()) { lock_.unlock(); }

 private:
  std::unique_lock<Mutex> lock_;
};

using CondVar = std::condition_variable_any;

}  // namespace torchrpc
