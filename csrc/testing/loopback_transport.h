#pragma once

// A transport between nodes of one process, for protocol tests. Segments are copied, and frames are delivered on the
// receiver's loop thread.

#include <memory>
#include <optional>
#include <string>

#include "transport/transport.h"

namespace torchrpc {

/// Connects the loopback transports of one group, which share its ownership.
class LoopbackNetwork;
std::shared_ptr<LoopbackNetwork> makeLoopbackNetwork();

/// Addresses are "loopback:<n>". `identity`: the identity of this side that peers are told; nullopt if workers have no
/// identities.
std::unique_ptr<Transport> makeLoopbackTransport(
    std::shared_ptr<LoopbackNetwork> network, Limits limits = {}, std::optional<PeerIdentity> identity = std::nullopt);

}  // namespace torchrpc
