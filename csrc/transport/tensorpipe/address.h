#pragma once

// The address of a node that uses TensorPipe.

#include <string>
#include <vector>

namespace torchrpc {

/// "tensorpipe:shm://83cc1#shm:4f…;uv://10.0.0.1:4242#uv:*;channels"
struct TensorPipeAddress {
  /// One of TensorPipe's transports on which the node listens.
  struct Endpoint {
    std::string url;
    /// TensorPipe's domain descriptor, by which a peer decides whether it can use the endpoint. For shm it contains the
    /// boot id and the network namespace, so that a peer on another host, or in another container, does not try.
    std::string domain;

    std::string transport() const { return url.substr(0, url.find("://")); }
  };
  std::vector<Endpoint> endpoints;  ///< in the listener's order of preference
  bool channels = false;            ///< whether the node has channels; if so, "basic" is among them

  std::string text() const;
  /// Throws Error(kInvalidArgument).
  static TensorPipeAddress parse(const std::string& text);
};

}  // namespace torchrpc
