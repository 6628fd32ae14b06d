#pragma once

// A value that one thread sets, once, and another thread waits for: the shortest way from a completion to a blocked
// caller. Both threads share its ownership, because the waiting thread may return before set() does.

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "base/executor/thread_pool.h"
#include "base/sync/futex_waiter.h"
#include "base/sync/interrupt.h"
#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

template <typename T>
class Waiter {
 public:
  /// Sets the value and wakes the waiting thread, or returns the value if that thread has abandoned the wait. To be
  /// called once; never blocks.
  std::optional<T> set(T value) {
    {
      MutexLock lock(mutex_);
      if (abandoned_) return value;
      value_.emplace(std::move(value));
      has_value_ = true;
    }
    arrived_.notify_one();
    futex_waiter_.notify();
    return std::nullopt;
  }

  /// Without the mutex, because threads that poll call it often. Sequentially consistent: see FutexWaiter::wait().
  bool hasValue() const { return has_value_; }

  /// Is notified when hasValue() becomes true. For a thread that waits by FutexWaiter::wait().
  FutexWaiter& futexWaiter() { return futex_waiter_; }

  /// Waits for the value and returns it; nullopt if it has not been set after `timeout`.
  std::optional<T> waitFor(Duration timeout) {
    MutexLock lock(mutex_);
    arrived_.wait_for(lock, timeout, [this]() TORCHRPC_REQUIRES(mutex_) { return value_.has_value(); });
    return takeLocked();
  }

  /// Returns the value; nullopt if it has not been set.
  std::optional<T> take() {
    if (!hasValue()) return std::nullopt;
    MutexLock lock(mutex_);
    return takeLocked();
  }

  /// Abandons the wait: a later set() returns its value. Returns the value if it has been set.
  std::optional<T> abandon() {
    MutexLock lock(mutex_);
    abandoned_ = true;
    return takeLocked();
  }

 private:
  std::optional<T> takeLocked() TORCHRPC_REQUIRES(mutex_) {
    has_value_ = false;
    return std::exchange(value_, std::nullopt);
  }

  Mutex mutex_;
  CondVar arrived_;
  FutexWaiter futex_waiter_;
  std::optional<T> value_ TORCHRPC_GUARDED_BY(mutex_);
  std::atomic<bool> has_value_{false};  ///< written with the mutex
  bool abandoned_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

/// Calls `start` with a handler and blocks until the handler is called. Returns its argument. A signal ends the wait
/// (checkInterrupt). For threads that may block.
template <typename T>
T waitFor(const std::function<void(std::function<void(T)>)>& start) {
  const auto waiter = std::make_shared<Waiter<T>>();
  start([waiter](T value) { waiter->set(std::move(value)); });
  const ThreadPool::BlockingScope blocking;
  for (;; checkInterrupt()) {
    if (auto value = waiter->waitFor(kSignalCheckInterval)) return *std::move(value);
  }
}

}  // namespace torchrpc
