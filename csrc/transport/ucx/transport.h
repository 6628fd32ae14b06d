#pragma once

// UCX, an engine for RDMA networks. It is looked for at run time. No file outside of this folder
// includes its headers.

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

/// Throws Error(kInvalidArgument) if UCX is missing, or cannot work here.
std::unique_ptr<Transport> makeUcxTransport(const UcxOptions& options);

/// What this machine lacks for UCX, and how to install it; empty: nothing.
std::string whatUcxLacks();

}  // namespace torchrpc::ucx
