#pragma once

// TensorPipe, linked from LibTorch. Its headers stay in tensorpipe_*.cpp.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace torchrpc {

struct TensorPipeOptions {
  /// Names in order of preference; empty optional: what is usable here and pays (see tensorpipe_backends.cpp).
  /// Names that do not exist here are passed over with a warning, never fatal (unless none is left).
  std::optional<std::vector<std::string>> transports;  ///< of shm, uv, ibv
  /// Of basic, cma, mpt_uv, xth: the ways beside the connection that large segments take. With an empty list they
  /// stay on the connection. A list without "basic" gets it as its last resort: the one that works everywhere.
  std::optional<std::vector<std::string>> channels;
  /// The address to listen on and to be reached at: a host name or an IP address. Empty: that of the interface which
  /// TORCHRPC_SOCKET_IFNAME (or TP_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) names; else loopback if `rendezvous_host` is
  /// "localhost" or a loopback address, else the address of the interface that leads there.
  std::string host;
  /// Where the group meets (MASTER_ADDR), if known.
  std::string rendezvous_host;
  std::string node_name;
  Limits limits;
};

/// Throws Error(kInvalidArgument) naming the option and what would be accepted.
std::unique_ptr<Transport> makeTensorPipeTransport(TensorPipeOptions options);

/// One transport or channel and whether this machine can use it; for defaults and for `torchrpc doctor`.
struct BackendProbe {
  std::string name;
  bool usable = false;
  std::string reason;  ///< why not, or empty
};
std::vector<BackendProbe> probeTensorPipeTransports();
std::vector<BackendProbe> probeTensorPipeChannels();

}  // namespace torchrpc
