#pragma once

// The text by which a TensorPipe node is reached.

#include <string>
#include <vector>

namespace torchrpc {

/// "tensorpipe:shm://83cc1#shm:4f…;uv://10.0.0.1:4242#uv:*;channels"
struct TensorPipeAddress {
  struct Way {
    std::string url;
    /// TensorPipe's word for who can use it: for shm the boot id and the network namespace, so that a peer on another
    /// host, or in another container, does not try.
    std::string domain;

    std::string transport() const { return url.substr(0, url.find("://")); }
  };
  std::vector<Way> ways;  ///< in the listener's order of preference
  bool channels = false;  ///< whether it has any, and so has "basic"

  std::string text() const;
  /// Throws Error(kInvalidArgument).
  static TensorPipeAddress parse(const std::string& text);
};

}  // namespace torchrpc
