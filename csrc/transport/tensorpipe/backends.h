#pragma once

// Which of TensorPipe's transports and channels a node uses: by the user's list, or what is usable here and pays.

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

/// Viable ones in order of preference. Throws Error(kInvalidArgument) if a list leaves none.
std::vector<TransportBackend> makeTransports(const std::optional<std::vector<std::string>>& names);

/// The same for channels; none for an empty list, else "basic" is among them. `address` is where channels that listen
/// themselves do so.
std::vector<ChannelBackend> makeChannels(
    const std::optional<std::vector<std::string>>& names, const std::vector<TransportBackend>& transports,
    const std::string& address);

/// "a,b"
template <typename TContext>
std::string namesOf(const std::vector<Backend<TContext>>& backends) {
  std::string text;
  for (const auto& backend : backends) text += (text.empty() ? "" : ",") + backend.name;
  return text;
}

}  // namespace torchrpc
