#pragma once

// Transport between nodes of one process: frames are copied and handed over on the receiver's loop thread.
// Deterministic enough for protocol tests, and what a single-process group uses.

#include <memory>
#include <string>

#include "transport/transport.h"

namespace torchrpc {

/// The "network" that loopback transports of one group meet on; outlives none of them (they share it).
class LoopbackNetwork;
std::shared_ptr<LoopbackNetwork> makeLoopbackNetwork();

/// Addresses are "loopback:<n>".
std::unique_ptr<Transport> makeLoopbackTransport(std::shared_ptr<LoopbackNetwork> network, Limits limits = {});

}  // namespace torchrpc
