#pragma once

// TensorPipe, linked from LibTorch. No file outside of this folder includes its headers.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/timer.h"
#include "transport/transport.h"

namespace torchrpc {

struct TensorPipeOptions {
  /// Names out of shm, ibv and uv, in order of preference. Without a list: all that this machine can use. A name that
  /// is unknown or not usable here causes a warning, or an error if no usable name is left.
  std::optional<std::vector<std::string>> transports;
  /// Names out of basic, cma, mpt_uv and xth, likewise. Channels carry large segments beside the connection. With an
  /// empty list, large segments stay on the connection. "basic", which works everywhere, is appended to any other list
  /// that lacks it. Without a list: see Note [Choice of backends].
  std::optional<std::vector<std::string>> channels;
  std::string host;  ///< this and the next: as in HostChoice
  std::string rendezvous_host;
  std::string node_name;
  Duration handshake_deadline = std::chrono::seconds(10);  ///< for connections that this node opens
  Limits limits;
};

/// Throws Error(kInvalidArgument) naming the option and the accepted values.
std::unique_ptr<Transport> makeTensorPipeTransport(const TensorPipeOptions& options);

/// A transport or channel, and whether this machine can use it; for `torchrpc doctor`.
struct BackendProbe {
  std::string name;
  bool usable = false;
  std::string reason;  ///< why the machine cannot use it; empty if it can
};
std::vector<BackendProbe> probeTensorPipeTransports();
std::vector<BackendProbe> probeTensorPipeChannels();

}  // namespace torchrpc
