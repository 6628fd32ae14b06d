#pragma once

// Long waits of a program's own threads, which its signals are to end: a language's runtime says how it looks for them.
// One for the process, as signals are.

#include <algorithm>

#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

/// `check` is called now and then by threads that wait, under no lock; what it throws ends the wait.
void setInterruptCheck(void (*check)());
/// Calls it, if there is one.
void checkInterrupt();

constexpr auto kSignalCheckInterval = std::chrono::milliseconds(100);

/// As CondVar::wait_until. False: the deadline (kNever: there is none) has passed.
template <typename Over>
bool waitInterruptibly(CondVar& changed, MutexLock& lock, TimePoint deadline, const Over& over) {
  while (!over()) {
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) return false;
    changed.wait_until(lock, std::min(deadline, now + kSignalCheckInterval), over);
    if (over()) return true;
    lock.unlock();
    checkInterrupt();
    lock.lock();
  }
  return true;
}

}  // namespace torchrpc
