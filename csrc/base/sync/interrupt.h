#pragma once

// Signals end long waits of a program's own threads: the binding to a language registers how its runtime checks for
// them. One check for the process, as signals are.

#include <algorithm>

#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

/// Waiting threads call `check` from time to time, without a lock; an exception that it throws ends the wait.
void setInterruptCheck(void (*check)());
/// Calls the registered check, if there is one.
void checkInterrupt();

constexpr auto kSignalCheckInterval = std::chrono::milliseconds(100);

/// As CondVar::wait_until. False if the deadline has passed (kNever: there is none).
template <typename Predicate>
bool waitInterruptibly(CondVar& changed, MutexLock& lock, TimePoint deadline, const Predicate& predicate)
    TORCHRPC_ANNOTATE(no_thread_safety_analysis) {  // it cannot name the mutex of `lock`
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
