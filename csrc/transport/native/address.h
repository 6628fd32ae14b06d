#pragma once

// The text by which peers reach a node that uses the native transport.

#include <cstdint>
#include <string>

namespace torchrpc::native {

/// "native:id=4f…;tcp=10.0.0.1:4242;host=83cc1….4026531840;unix=torchrpc-4f…"
struct Address {
  /// Random. The opener's HELLO repeats it, so that a connection to a port that another worker has since taken fails.
  uint64_t id = 0;
  std::string tcp;        ///< numeric host and port, as "10.0.0.1:4242" or "[fd00::2]:4242"; never empty
  std::string host;       ///< hostIdentity() of the node; empty if it does not listen on a Unix socket
  std::string unix_name;  ///< of the abstract Unix socket, without the leading zero byte

  std::string text() const;
  /// Throws Error(kInvalidArgument) for malformed text.
  static Address parse(const std::string& text);
};

/// Identifies the machine (its boot) and the network namespace. Processes with the same identity reach each other by
/// abstract Unix sockets. Empty if the system does not provide both.
std::string hostIdentity();

}  // namespace torchrpc::native
