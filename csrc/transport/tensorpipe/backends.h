#pragma once

// The choice of a node's TensorPipe transports and channels: from the user's lists, or by Note [Choice of backends].

#include <tensorpipe/tensorpipe.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torchrpc {

template <typename TContext>
struct Backend {
  std::string name;
  std::shared_ptr<TContext> context;
};
using TransportBackend = Backend<tensorpipe::transport::Context>;
using ChannelBackend = Backend<tensorpipe::channel::Context>;

/// Makes the transports (of `names`, if given) that this machine can use, in order of preference. Throws
/// Error(kInvalidArgument) if it can use none.
std::vector<TransportBackend> makeTransports(const std::optional<std::vector<std::string>>& names);

/// Does the same for channels. Returns none for an empty list; if it returns any, "basic" is among them. Channels with
/// listeners of their own listen on `address`.
std::vector<ChannelBackend> makeChannels(
    const std::optional<std::vector<std::string>>& names, const std::vector<TransportBackend>& transports,
    const std::string& address);

/// Returns the names as "a,b".
template <typename TContext>
std::string namesOf(const std::vector<Backend<TContext>>& backends) {
  std::string text;
  for (const auto& backend : backends) text += (text.empty() ? "" : ",") + backend.name;
  return text;
}

}  // namespace torchrpc
