#pragma once

// How much time is left to the request that a thread serves: calls that it makes meanwhile get no more.

#include "base/timer.h"

namespace torchrpc {

/// kNever if the thread serves none, or one without a deadline.
TimePoint currentDeadline();

class DeadlineScope {
 public:
  explicit DeadlineScope(TimePoint deadline);
  ~DeadlineScope();
  DeadlineScope(const DeadlineScope&) = delete;
  DeadlineScope& operator=(const DeadlineScope&) = delete;

 private:
  const TimePoint outer_;
};

}  // namespace torchrpc
