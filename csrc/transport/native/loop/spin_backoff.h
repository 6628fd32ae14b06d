#pragma once

// Decides when threads that poll give way to threads that compute: see Note [Busy polling] in event_loop.cpp.
// Threads: any.

#include <atomic>
#include <chrono>

#include "base/timer.h"

namespace torchrpc::native {

class SpinBackoff {
 public:
  /// Whether threads should not begin to poll, because the machine has more runnable threads than cores.
  bool isPaused(TimePoint at = std::chrono::steady_clock::now()) const { return at < pause_until_.load(); }

  /// sched_yield(). False if it took so long that the thread should stop polling.
  bool yield();

  /// The decision of yield(), for a yield that lasted from `before` until `after`: may begin a pause.
  bool recordYield(TimePoint before, TimePoint after);

 private:
  std::atomic<TimePoint> pause_until_{TimePoint()};
  std::atomic<Duration> pause_{Duration::zero()};  ///< length of the latest pause
};

}  // namespace torchrpc::native
