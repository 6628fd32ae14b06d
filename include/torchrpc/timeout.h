#pragma once

// Durations and time-outs.
// Threads: any.

#include <chrono>

namespace torchrpc {

/// A span of time: `std::chrono::seconds(5)` converts to it.
using Duration = std::chrono::steady_clock::duration;

/// A time-out without a limit.
constexpr Duration kNoLimit = Duration::max();

/// A time-out, from a std::chrono duration of any unit. kNoLimit means no limit, and so does a duration that is longer
/// than the clock can represent. Functions with a Timeout parameter throw Error(kInvalidArgument) for a negative
/// duration or NaN. With 0, functions that wait (Future::wait(), Future::waitFor(), Node::waitForStopRequest()) return
/// or throw without blocking. Where 0 makes no sense (a call, a fetch, the options of a node, shutdown(), leave()), it
/// is refused in the same way.
class Timeout {
 public:
  /// Implicit, so that callers can write `5s`. NOLINTNEXTLINE(google-explicit-constructor)
  template <typename Rep, typename Period>
  constexpr Timeout(std::chrono::duration<Rep, Period> duration) : duration_(saturated(duration)) {}

  /// The given duration, clamped to the range of Duration; the shortest Duration for NaN.
  constexpr Duration duration() const { return duration_; }

 private:
  template <typename Rep, typename Period>
  static constexpr Duration saturated(std::chrono::duration<Rep, Period> duration) {
    using Wide = std::chrono::duration<long double, Duration::period>;
    const Wide wide = duration;
    if (wide >= Wide(Duration::max())) return Duration::max();
    if (!(wide > Wide(Duration::min()))) return Duration::min();
    return std::chrono::ceil<Duration>(duration);
  }

  Duration duration_;
};

}  // namespace torchrpc
