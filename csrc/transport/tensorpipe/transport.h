#pragma once

// TensorPipe, linked from LibTorch. No file outside of this folder includes its headers.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace torchrpc {

struct TensorPipeOptions {
  /// Names of shm, ibv and uv in order of preference. Without a list: all that are usable here. Names that are unknown
  /// or not usable here cause a warning, or an error if no usable name is left.
  std::optional<std::vector<std::string>> transports;
  /// Names of basic, cma, mpt_uv and xth, likewise: channels carry large segments beside the connection. With an empty
  /// list, large segments stay on the connection. "basic", which works everywhere, is appended to any other list.
  /// Without a list: see Note [Choice of backends].
  std::optional<std::vector<std::string>> channels;
  std::string host;  ///< this and the next: as in HostChoice
  std::string rendezvous_host;
  std::string node_name;
  Limits limits;
};

/// Throws Error(kInvalidArgument) naming the option and the accepted values.
std::unique_ptr<Transport> makeTensorPipeTransport(const TensorPipeOptions& options);

/// A transport or channel, and whether this machine can use it; for `torchrpc doctor`.
struct BackendProbe {
  std::string name;
  bool usable = false;
  std::string reason;  ///< why it cannot; empty if it can
};
std::vector<BackendProbe> probeTensorPipeTransports();
std::vector<BackendProbe> probeTensorPipeChannels();

}  // namespace torchrpc
