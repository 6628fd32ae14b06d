#pragma once

// Decides when threads that poll yield their core to other threads: see Note [Busy polling] in event_loop.cpp.
// Threads: any.

#include <atomic>
#include <chrono>

#include "base/timer.h"

namespace torchrpc::native {

class SpinBackoff {
 public:
  /// Whether threads should not begin to poll, because the machine has more runnable threads than cores.
  bool isPaused(TimePoint at = std::chrono::steady_clock::now()) const { return at < pause_until_.load(); }

  /// Calls sched_yield(). Returns false if the yield took so long that the thread should stop polling.
  bool yield();

  /// Evaluates a yield that lasted from `before` to `after`: returns the result of yield(), and may begin a pause.
  bool recordYield(TimePoint before, TimePoint after);

 private:
  std::atomic<TimePoint> pause_until_{TimePoint()};
  std::atomic<Duration> pause_{Duration::zero()};  ///< length of the latest pause
};

}  // namespace torchrpc::native
