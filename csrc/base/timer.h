#pragma once

// Timeouts, deadlines, and timers that run tasks at them. One interface, two clocks: that of a thread that sleeps
// (makeThreadTimer), and one that a test advances (testing/manual_timer.h).

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "torchrpc/timeout.h"

namespace torchrpc {

using TimePoint = std::chrono::steady_clock::time_point;

/// The deadline that kNoLimit gives. Inside the core nothing else means "no limit". Python's interface writes 0 seconds
/// for it, as torch does: it translates with noLimitIfZero().
constexpr TimePoint kNever = TimePoint::max();

constexpr Duration noLimitIfZero(Duration timeout) { return timeout == Duration::zero() ? kNoLimit : timeout; }

/// Rounded up; kNoLimit for more than a century, which the clock cannot count safely.
inline Duration durationFromSeconds(double seconds) {
  constexpr double kCenturySeconds = 3e9;
  return seconds > kCenturySeconds ? kNoLimit : std::chrono::ceil<Duration>(std::chrono::duration<double>(seconds));
}

/// `timeout` after `start`; kNever for kNoLimit and for every timeout that is too long for the clock.
constexpr TimePoint deadlineAfter(Duration timeout, TimePoint start) {
  if (timeout < -start.time_since_epoch()) return {};  // the clock begins there
  return timeout < kNever - start ? start + timeout : kNever;
}
/// `timeout` from now on.
inline TimePoint deadlineAfter(Duration timeout) { return deadlineAfter(timeout, std::chrono::steady_clock::now()); }

/// What is left until the deadline, not negative; kNoLimit for kNever.
inline Duration timeUntil(TimePoint deadline) {
  if (deadline == kNever) return kNoLimit;
  return std::max<Duration>(deadline - std::chrono::steady_clock::now(), Duration::zero());
}

class Timer {
 public:
  using Id = uint64_t;
  virtual ~Timer() = default;

  virtual TimePoint now() const = 0;

  /// Runs `task` once, at `when` or soon after, on the timer's thread: it must be brief, not block and not throw.
  /// Tasks that are due at the same time run in the order in which they were added. close() drops pending tasks; after
  /// it at() drops its task and returns the id 0. Thread-safe.
  virtual Id at(TimePoint when, std::function<void()> task) = 0;

  /// True if the task will not run; false if it has run, is running, or is unknown. Thread-safe; does not wait.
  virtual bool cancel(Id id) = 0;

  /// Drops the pending tasks and waits for the running one (unless that calls close()). Idempotent. A task must not
  /// destroy its own timer.
  virtual void close() = 0;

  /// As at(), `delay` from now on; never for kNoLimit.
  Id after(Duration delay, std::function<void()> task) { return at(deadlineAfter(delay, now()), std::move(task)); }
};

/// A timer on the real clock, with a thread. Throws Error if the thread cannot be started.
std::unique_ptr<Timer> makeThreadTimer();

}  // namespace torchrpc
