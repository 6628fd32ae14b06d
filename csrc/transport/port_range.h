#pragma once

// The ports that a transport may listen on.

#include <cstdint>
#include <string>

namespace torchrpc {

/// First and last port, both included. If both are 0, the system chooses a port.
struct PortRange {
  uint16_t first = 0, last = 0;
  bool operator==(const PortRange&) const = default;
};

/// Parses `option` or, if it is empty, the environment variable TORCHRPC_PORT: a port ("29600") or a range
/// ("29600-29700"), of which the transport uses the first free port. With "0" or an empty text the system chooses the
/// port. Throws Error(kInvalidArgument) naming the option or the variable.
PortRange listenPorts(const std::string& option);

}  // namespace torchrpc
