#pragma once

// The error for an address that a transport cannot use.

#include <string>
#include <string_view>

#include "base/error.h"

namespace torchrpc {

/// Returns the error (kInvalidArgument) of a transport whose addresses begin with `scheme` and a colon, for an address
/// that it cannot parse. If the address has another scheme, the text names both transports and the remedy.
Error wrongAddress(std::string_view scheme, const std::string& address);

}  // namespace torchrpc
