#pragma once

// The ports that a transport may listen on.

#include <cstdint>
#include <string>

namespace torchrpc {

/// First and last, both included. Both 0: the system chooses a port.
struct PortRange {
  uint16_t first = 0, last = 0;
  bool operator==(const PortRange&) const = default;
};

/// Reads `option`, or the environment variable TORCHRPC_PORT if that is empty: a port or a range, "29600" or
/// "29600-29700", of which the first free port is meant; "0" or nothing: the system chooses. Throws
/// Error(kInvalidArgument) naming the option or the variable.
PortRange listenPorts(const std::string& option);

}  // namespace torchrpc
