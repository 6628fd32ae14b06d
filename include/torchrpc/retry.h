#pragma once

// How a call is repeated when its worker is lost before it has answered.

#include <chrono>
#include <cstdint>

#include "torchrpc/timeout.h"

namespace torchrpc {

/// How often, and when, a call is sent again. A call is sent again only if the connection to the callee ended, or could
/// not be made, before the answer arrived: an answer ends the call, and so does an error that the function raised. All
/// attempts together take no longer than the call's time-out. The callee runs the function once, however often the call
/// arrives. A value: copies are independent.
struct RetryPolicy {
  /// How often the call may be sent again; at most 1,000.
  uint32_t retries = 0;
  /// The pause before the second attempt. Each further pause is twice as long, up to `max_delay`; of each a random
  /// part, half of it at most, is left out, so that callers that lost a worker together do not come back together.
  Duration first_delay = std::chrono::milliseconds(50);
  Duration max_delay = std::chrono::seconds(2);  ///< the longest pause
  /// Whether a call that a worker may have run is sent to a worker that has been started again under its name. That one
  /// knows nothing of what the earlier one ran: the function may then run twice.
  bool after_restart = false;
  /// After so many losses in a row of one worker, calls with retries to it fail at once, for `breaker_cooldown` after
  /// the last loss; then one of them tries again. 0: never. Calls that are under way go on.
  uint32_t breaker_losses = 8;
  Duration breaker_cooldown = std::chrono::seconds(1);  ///< see breaker_losses
};

}  // namespace torchrpc
