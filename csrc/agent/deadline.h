#pragma once

// The deadline of the request that a thread serves: it bounds the calls that the thread makes meanwhile.

#include "base/timer.h"

namespace torchrpc {

/// The deadline of the request that the calling thread serves; kNever if it serves no request, or one without a
/// deadline.
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
