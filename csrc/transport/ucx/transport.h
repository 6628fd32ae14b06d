#pragma once

// The transport over UCX, a communication library for RDMA networks. UCX is loaded at run time. No file outside of this
// folder includes its headers.

#include <memory>
#include <string>

#include "transport/port_range.h"
#include "transport/transport.h"

namespace torchrpc::ucx {

struct UcxOptions {
  std::string host;  ///< this and the next: as in HostChoice
  std::string rendezvous_host;
  PortRange ports;
  Limits limits;
};

/// Throws Error(kInvalidArgument) if UCX is missing, or does not work on this machine.
std::unique_ptr<Transport> makeUcxTransport(const UcxOptions& options);

/// Returns what this machine lacks for UCX, and how to install it; empty if nothing is missing.
std::string whatUcxLacks();

}  // namespace torchrpc::ucx
