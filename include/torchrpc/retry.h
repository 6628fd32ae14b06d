#pragma once

// How a call is repeated when its worker is lost before it has answered.

#include <chrono>
#include <cstdint>

#include "torchrpc/timeout.h"

namespace torchrpc {

/// How often, and when, a call is sent again. A call is sent again only if the connection to the callee ended, or could
/// not be made, before the answer arrived, or if the callee answered that it is shutting down and has not begun the
/// call. Any other answer ends the call, also an error that the function raised. All attempts together take no longer
/// than the call's time-out. The callee runs the function once, however often the call arrives. A value: copies are
/// independent.
struct RetryPolicy {
  /// How often the call may be sent again; at most 1,000.
  uint32_t retries = 0;
  /// The pause before the second attempt. Each further pause is twice as long, up to `max_delay`; a random part of each
  /// pause, at most half, is left out, so that callers that lost a worker at the same time do not retry at the same
  /// time.
  Duration first_delay = std::chrono::milliseconds(50);
  Duration max_delay = std::chrono::seconds(2);  ///< the longest pause
  /// Whether a call that the lost worker may have run is sent again to a worker that was restarted under its name. The
  /// restarted worker does not know which calls the earlier one ran, so the function may run twice.
  bool after_restart = false;
  /// After this many losses of a worker in a row, calls with retries to it fail at once, for `breaker_cooldown` after
  /// the last loss; then one of them tries again. 0: never. Calls that are under way go on.
  uint32_t breaker_losses = 8;
  Duration breaker_cooldown = std::chrono::seconds(1);  ///< see breaker_losses
};

}  // namespace torchrpc
