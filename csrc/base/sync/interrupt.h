#pragma once

// Lets signals interrupt long waits of the program's threads. The binding to a language registers the function by which
// its runtime checks for signals. There is one such function for the process.

#include <algorithm>
#include <functional>

#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

/// Registers `check`. Waiting threads call it every kSignalCheckInterval or so, without a lock. If it throws, the
/// exception ends the wait.
void setInterruptCheck(void (*check)());
/// Calls the registered check, if there is one, and that of the thread's InterruptScope.
void checkInterrupt();

/// While this object lives, `check` can end the long waits of the calling thread, as the registered check can. Scopes
/// do not nest.
class InterruptScope {
 public:
  explicit InterruptScope(std::function<void()> check);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  friend void checkInterrupt();
  const std::function<void()> check_;
};

constexpr auto kSignalCheckInterval = std::chrono::milliseconds(100);

/// As CondVar::wait_until(), but calls checkInterrupt() from time to time. Returns false if the deadline has passed
/// (kNever: no deadline).
template <typename Predicate>
bool waitInterruptibly(CondVar& changed, MutexLock& lock, TimePoint deadline, const Predicate& predicate)
    TORCHRPC_ANNOTATE(no_thread_safety_analysis) {  // the analysis cannot name the mutex of `lock`
  while (!predicate()) {
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) return false;
    changed.wait_until(lock, std::min(deadline, now + kSignalCheckInterval), predicate);
    if (predicate()) return true;
    lock.unlock();
    checkInterrupt();
    lock.lock();
  }
  return true;
}

}  // namespace torchrpc
