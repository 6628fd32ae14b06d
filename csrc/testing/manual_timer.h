#pragma once

// A timer whose clock a test advances.

#include <cstddef>
#include <functional>
#include <memory>

#include "base/timer.h"

namespace torchrpc {

/// Time stands still until advance(), which runs the tasks that become due, in order of their time.
class ManualTimer : public Timer {
 public:
  ManualTimer();
  ~ManualTimer() override;
  TimePoint now() const override;
  Id at(TimePoint when, std::function<void()> task) override;
  bool cancel(Id id) override;
  void close() override;
  void advance(Duration by);
  /// How many tasks are pending.
  size_t pending() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace torchrpc
