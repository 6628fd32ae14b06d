#pragma once

// What transports say of addresses that others have made.

#include <string>

#include "base/error.h"

namespace torchrpc {

/// kInvalidArgument for an address that a `kind` transport ("native", "tensorpipe") cannot read: that of another kind
/// of transport, with the remedy, or nonsense.
Error wrongAddress(const std::string& kind, const std::string& address);

}  // namespace torchrpc
