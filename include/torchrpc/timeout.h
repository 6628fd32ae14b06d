#pragma once

// How long something may take.
// Threads: any.

#include <chrono>

namespace torchrpc {

/// A span of time: `std::chrono::seconds(5)` converts to it.
using Duration = std::chrono::steady_clock::duration;

/// A time-out without a limit.
constexpr Duration kNoLimit = Duration::max();

/// A time-out, from a std::chrono duration of any unit. kNoLimit is none, and so is more than the clock can count.
/// Functions that take one throw Error(kInvalidArgument) for a negative duration or NaN. 0 is "now" for those that wait
/// (Future::wait(), Future::waitFor(), Node::waitForStopRequest()): they only look. Where nothing could be done in no
/// time (a call, a fetch, the options of a node, shutdown()), it is refused.
class Timeout {
 public:
  /// Implicit, so that callers can write `5s`. NOLINTNEXTLINE(google-explicit-constructor)
  template <typename Rep, typename Period>
  constexpr Timeout(std::chrono::duration<Rep, Period> duration) : duration_(saturated(duration)) {}

  /// As given; the longest or the shortest Duration for what that type cannot represent, the shortest one for NaN.
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
