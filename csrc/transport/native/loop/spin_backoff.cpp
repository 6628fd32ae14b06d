#include "transport/native/loop/spin_backoff.h"

#include <algorithm>
#include <sched.h>

namespace torchrpc::native {

namespace {
constexpr auto kLongYield = std::chrono::microseconds(20);
constexpr auto kTimeSlice = std::chrono::microseconds(500);
// Lengths of pauses, in multiples of the yield that caused them.
constexpr int kFirstPauseYields = 2;
constexpr int kMaxPauseYields = 50;
}  // namespace

bool SpinBackoff::yield() {
  const auto before = std::chrono::steady_clock::now();
  ::sched_yield();
  return recordYield(before, std::chrono::steady_clock::now());
}

bool SpinBackoff::recordYield(TimePoint before, TimePoint after) {
  const auto away = after - before;
  if (away >= kTimeSlice) {
    const Duration latest = pause_;
    const bool again = before < pause_until_.load() + latest;
    const Duration pause = again ? std::min<Duration>(2 * latest, kMaxPauseYields * away) : kFirstPauseYields * away;
    pause_ = pause;
    pause_until_ = after + pause;
  }
  return away <= kLongYield;
}

}  // namespace torchrpc::native
