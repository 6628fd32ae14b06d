#pragma once

// A value that one thread waits for and another gives, once. The shortest way from a completion to a blocked caller.
// Shared by the two: who waits may be gone before who gives has come back.

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
  /// Gives the value back if nobody waits for it any more. Once; never blocks.
  std::optional<T> set(T value) {
    {
      MutexLock lock(mutex_);
      if (abandoned_) return value;
      value_.emplace(std::move(value));
    }
    arrived_.notify_one();
    futex_waiter_.ring();
    return std::nullopt;
  }

  bool hasValue() {
    MutexLock lock(mutex_);
    return value_.has_value();
  }

  /// For who waits for hasValue() elsewhere.
  FutexWaiter& waiter() { return futex_waiter_; }

  /// The value, or nothing if it has not come after so long.
  std::optional<T> waitFor(Duration patience) {
    MutexLock lock(mutex_);
    arrived_.wait_for(lock, patience, [this] { return value_.has_value(); });
    return std::exchange(value_, std::nullopt);
  }

  /// Waits no longer; gives the value if it has come meanwhile.
  std::optional<T> abandon() {
    MutexLock lock(mutex_);
    abandoned_ = true;
    return std::exchange(value_, std::nullopt);
  }

 private:
  Mutex mutex_;
  CondVar arrived_;
  FutexWaiter futex_waiter_;
  // guarded by mutex_:
  std::optional<T> value_;
  bool abandoned_ = false;
};

/// What the handler that `start` is given gets; unless a signal ends the wait. For threads that may block.
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
