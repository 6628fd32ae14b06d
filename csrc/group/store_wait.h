#pragma once

// Waits until a store of c10d answers at a host and port, as the workers of a group do before they open it: c10d's
// client may pause for most of a minute when its first connection is refused, and waits without end for a process that
// was stopped. Threads: any; blocks.

#include <cstdint>
#include <string>

#include "base/timer.h"

namespace torchrpc {

/// Waits until the name has an address: names of a cluster may be known only some time after their host has started.
/// Logs a warning that names the host, once, after ten seconds, if it `warns`. A signal ends the wait. Returns an empty
/// string if the name has an address, or the reason why it has none when the timeout has passed.
std::string waitForName(const std::string& host, Duration timeout, bool warns = true);

/// waitForName(), then waits until a TCPStore answers on a connection to the port, which is closed at once.
std::string waitForStore(const std::string& host, uint16_t port, Duration timeout, bool warns = true);

}  // namespace torchrpc
