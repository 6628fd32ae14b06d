#pragma once

// Time-outs, deadlines, and timers that run a task at a deadline. The interface has two implementations: a thread that
// sleeps (makeThreadTimer), and a clock that a test advances (testing/manual_timer.h).

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "torchrpc/timeout.h"

namespace torchrpc {

using TimePoint = std::chrono::steady_clock::time_point;

/// The deadline of kNoLimit. Inside the core nothing else means "no limit". The Python API uses 0 seconds for it, as
/// torch does, and converts them by noLimitIfZero().
constexpr TimePoint kNever = TimePoint::max();

constexpr Duration noLimitIfZero(Duration timeout) { return timeout == Duration::zero() ? kNoLimit : timeout; }

/// Converts seconds, rounded up. Returns kNoLimit for more than a century, which the clock cannot count safely.
inline Duration durationFromSeconds(double seconds) {
  constexpr double kCenturySeconds = 3e9;
  return seconds > kCenturySeconds ? kNoLimit : std::chrono::ceil<Duration>(std::chrono::duration<double>(seconds));
}

/// Returns the time `timeout` after `start`; kNever for kNoLimit and for every time-out that is too long for the clock.
constexpr TimePoint deadlineAfter(Duration timeout, TimePoint start) {
  if (timeout < -start.time_since_epoch()) return {};  // not before the epoch of the clock
  return timeout < kNever - start ? start + timeout : kNever;
}
/// The same, from now on.
inline TimePoint deadlineAfter(Duration timeout) { return deadlineAfter(timeout, std::chrono::steady_clock::now()); }

/// Returns the time that is left until the deadline, 0 if it has passed; kNoLimit for kNever.
inline Duration timeUntil(TimePoint deadline) {
  if (deadline == kNever) return kNoLimit;
  return std::max<Duration>(deadline - std::chrono::steady_clock::now(), Duration::zero());
}

class Timer {
 public:
  using Id = uint64_t;
  virtual ~Timer() = default;

  virtual TimePoint now() const = 0;

  /// Runs `task` once, at `when` or soon after, on the timer's thread. The task must be brief, and neither block nor
  /// throw. Tasks that are due at the same time run in the order in which they were added. After close(), at() drops
  /// the task and returns the id 0. Thread-safe.
  virtual Id at(TimePoint when, std::function<void()> task) = 0;

  /// Returns true if the task will not run; false if it has run, is running, or is unknown. Thread-safe; does not wait.
  virtual bool cancel(Id id) = 0;

  /// Drops the pending tasks and waits for the running task, unless that task calls close() itself. Idempotent. A task
  /// must not destroy its own timer.
  virtual void close() = 0;

  /// Calls at() for `delay` from now on. With kNoLimit the task never runs.
  Id after(Duration delay, std::function<void()> task) { return at(deadlineAfter(delay, now()), std::move(task)); }
};

/// Returns a timer on the real clock, with a thread of its own. Throws Error if the thread cannot be started.
std::unique_ptr<Timer> makeThreadTimer();

}  // namespace torchrpc
