#pragma once

// Addresses that a transport cannot use.

#include <string>
#include <string_view>

#include "base/error.h"

namespace torchrpc {

/// The error (kInvalidArgument) for an address that does not parse as one of the transport whose addresses begin with
/// `scheme` and a colon. If the address has another scheme, the text names both transports and the remedy.
Error wrongAddress(std::string_view scheme, const std::string& address);

}  // namespace torchrpc
