#pragma once

// Deadlines. One interface, two clocks: a thread that sleeps (makeThreadTimer), and one that a test advances
// (testing/manual_timer.h).

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace torchrpc {

using Duration = std::chrono::steady_clock::duration;
using TimePoint = std::chrono::steady_clock::time_point;

/// "No deadline".
constexpr TimePoint kNever = TimePoint::max();

/// The end of a wait of that length; waits longer than the clock can count have none.
inline TimePoint deadlineAfter(Duration timeout) {
  const auto now = std::chrono::steady_clock::now();
  return timeout < kNever - now ? now + timeout : kNever;
}

class Timer {
 public:
  using Id = uint64_t;
  virtual ~Timer() = default;

  virtual TimePoint now() const = 0;

  /// Runs `task` once, at `when` or soon after, on the timer's thread: it must be brief, not block and not throw.
  /// Tasks of one time run in the order of the calls. A task that `close` finds pending, or that comes after it (which
  /// gives the id 0), is dropped unrun. Thread-safe.
  virtual Id at(TimePoint when, std::function<void()> task) = 0;

  /// True if the task will not run; false if it has run, runs now, or is unknown. Thread-safe; does not wait.
  virtual bool cancel(Id id) = 0;

  /// Drops what is pending and waits for a task under way (unless called from it). Idempotent. A task must not destroy
  /// the timer it runs on.
  virtual void close() = 0;

  /// As at(), counted from now; a delay too long for the clock means kNever.
  Id after(Duration delay, std::function<void()> task) {
    const TimePoint start = now();
    return at(delay < kNever - start ? start + delay : kNever, std::move(task));
  }
};

/// The real clock: a thread of its own, started with the first task.
std::unique_ptr<Timer> makeThreadTimer();

}  // namespace torchrpc
