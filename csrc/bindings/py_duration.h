#pragma once

// Conversions between durations and Python's numbers of seconds.

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/timer.h"

namespace torchrpc::bindings {

/// Returns seconds; 0 for kNoLimit.
inline double toSeconds(Duration duration) {
  return duration == kNoLimit ? 0 : std::chrono::duration<double>(duration).count();
}

/// Converts a time-out; 0, and more than a century, mean no limit. `option` is its name in the error text. Throws
/// Error(kInvalidArgument) for a negative number or NaN.
inline Duration toTimeout(double seconds, const char* option) {
  if (seconds >= 0) return noLimitIfZero(durationFromSeconds(seconds));
  throwInvalidArgument(
      std::string(option) + " must be a number of seconds, 0 for none, but got " + std::to_string(seconds));
}

}  // namespace torchrpc::bindings
