#pragma once

// A value that one thread sets, once, and another thread waits for: the shortest way from a completion to a blocked
// caller. Both threads share its ownership, because the waiting thread may return before set() does.

#include <atomic>
#include <cstdint>
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
  /// called once; takes the mutex only if the thread sleeps in waitFor().
  std::optional<T> set(T&& value) {
    value_.emplace(std::move(value));
    auto expected = State::kEmpty;
    if (!state_.compare_exchange_strong(expected, State::kSet)) return std::exchange(value_, std::nullopt);
    // Sequentially consistent, as all accesses to these two: either the thread sees the state, or this one that it is
    // about to sleep.
    if (is_asleep_) {
      MutexLock lock(mutex_);  // the thread sleeps, or has seen the state
      arrived_.notify_one();
    }
    futex_waiter_.notify();
    return std::nullopt;
  }

  /// Sequentially consistent: see FutexWaiter::wait().
  bool hasValue() const { return state_ == State::kSet; }

  /// Is notified when hasValue() becomes true. For a thread that waits by FutexWaiter::wait().
  FutexWaiter& futexWaiter() { return futex_waiter_; }

  /// Waits for the value and returns it; nullopt if it has not been set after `timeout`.
  std::optional<T> waitFor(Duration timeout) {
    if (!hasValue()) {
      MutexLock lock(mutex_);
      is_asleep_ = true;
      arrived_.wait_for(lock, timeout, [this] { return hasValue(); });
      is_asleep_ = false;
    }
    return take();
  }

  /// Returns the value; nullopt if it has not been set.
  std::optional<T> take() {
    if (!hasValue()) return std::nullopt;
    state_ = State::kTaken;
    return std::exchange(value_, std::nullopt);
  }

  /// Abandons the wait: a later set() returns its value. Returns the value if it has been set.
  std::optional<T> abandon() {
    auto expected = State::kEmpty;
    state_.compare_exchange_strong(expected, State::kAbandoned);
    return take();
  }

 private:
  enum class State : uint8_t { kEmpty, kSet, kTaken, kAbandoned };

  std::atomic<State> state_{State::kEmpty};
  std::optional<T> value_;  ///< belongs to set() while the state is kEmpty or kAbandoned, then to the waiting thread
  std::atomic<bool> is_asleep_{false};
  Mutex mutex_;
  CondVar arrived_;
  FutexWaiter futex_waiter_;
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
