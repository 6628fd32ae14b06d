#pragma once

// A timer with a clock that only moves when a test advances it.

#include <cstddef>
#include <functional>
#include <memory>

#include "base/timer.h"

namespace torchrpc {

/// advance() runs the tasks that become due, in the order of their times, on the calling thread.
class ManualTimer : public Timer {
 public:
  ManualTimer();
  ~ManualTimer() override;
  TimePoint now() const override;
  Id at(TimePoint when, std::function<void()> task) override;
  bool cancel(Id id) override;
  void close() override;
  void advance(Duration by);
  /// The number of pending tasks.
  size_t pending() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace torchrpc
