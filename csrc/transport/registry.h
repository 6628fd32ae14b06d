#pragma once

// Which transport a node uses, where its user leaves that open or names one.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace torchrpc {

struct TransportOptions {
  /// "native", "tcp" (native, within a host, too), "tensorpipe" or "auto"; empty: what the environment variable
  /// TORCHRPC_TRANSPORT says, else "auto", which is native: the one that makes small calls several times faster, sleeps
  /// when it is idle, and cannot be brought down by strangers (benchmarks/README.md). All workers of a group must use
  /// the same. The native one also reads TORCHRPC_SPIN_US: how long threads that wait look for news before they sleep.
  std::string kind;
  /// TensorPipe's transports and channels, as in TensorPipeOptions; a list of either makes the choice TensorPipe,
  /// unless the transports are just {"native"}.
  std::optional<std::vector<std::string>> transports;
  std::optional<std::vector<std::string>> channels;
  std::string host;  ///< this and the next: as in TensorPipeOptions
  std::string rendezvous_host;
  std::string node_name;
  /// Of the group; empty: none. TensorPipe cannot prove one.
  std::string secret;
  /// A port to listen on or a range of them, "29600" or "29600-29700", of which the first free one is taken; empty:
  /// what TORCHRPC_PORT says, else "0": the system chooses. The native transport's only.
  std::string port;
  Limits limits;
};

/// Whether the transport that these options choose makes peers prove a secret. Throws as makeTransport.
bool authenticatesPeers(const TransportOptions& options);

/// Throws Error(kInvalidArgument) naming the option or variable and what would be accepted.
std::unique_ptr<Transport> makeTransport(TransportOptions options);

}  // namespace torchrpc
