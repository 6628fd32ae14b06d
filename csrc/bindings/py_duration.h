#pragma once

// Numbers of seconds, as Python has them, and durations.

#include <string>

#include "base/error.h"
#include "base/timer.h"

namespace torchrpc::bindings {

/// A century. Durations in nanoseconds cannot be much longer.
constexpr double kLongestSeconds = 3e9;

constexpr double toSeconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

/// Rounded up. `seconds` must be from 0 to kLongestSeconds.
constexpr Duration toDuration(double seconds) {
  return std::chrono::ceil<Duration>(std::chrono::duration<double>(seconds));
}

/// Throws Error(kInvalidArgument), which names `option`, unless `seconds` is a number from 0.
inline void checkSeconds(double seconds, const char* option) {
  if (seconds >= 0) return;
  throwInvalidArgument(
      std::string(option) + " must be a number of seconds, 0 for none, but got " + std::to_string(seconds));
}

/// A time-out: 0, or anything longer than a century, is no limit. Throws as checkSeconds.
inline Duration toTimeout(double seconds, const char* option) {
  checkSeconds(seconds, option);
  return seconds > kLongestSeconds ? Duration::zero() : toDuration(seconds);
}

}  // namespace torchrpc::bindings
