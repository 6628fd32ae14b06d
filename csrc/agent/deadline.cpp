#include "agent/deadline.h"

#include <utility>

namespace torchrpc {

namespace {
thread_local TimePoint current = kNever;
}

TimePoint currentDeadline() { return current; }

DeadlineScope::DeadlineScope(TimePoint deadline) : outer_(std::exchange(current, deadline)) {}

DeadlineScope::~DeadlineScope() { current = outer_; }

}  // namespace torchrpc
