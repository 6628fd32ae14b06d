#pragma once

// The text by which a native node is reached.

#include <cstdint>
#include <string>

namespace torchrpc::native {

/// "native:id=4f…;tcp=10.0.0.1:4242;host=83cc1….4026531840;unix=torchrpc-4f…"
struct Address {
  uint64_t id = 0;        ///< of the listener, by chance: callers repeat it, so that nobody reaches who came after it
  std::string tcp;        ///< numeric host and port, as "10.0.0.1:4242" or "[fd00::2]:4242"; always there
  std::string host;       ///< where `unix` can be reached from; empty if it does not listen there
  std::string unix_name;  ///< of the abstract socket, without the leading zero

  std::string text() const;
  /// Throws Error(kInvalidArgument).
  static Address parse(const std::string& text);
};

/// Names the machine and the network namespace: abstract Unix sockets reach as far. Empty if that cannot be told.
std::string hostIdentity();

}  // namespace torchrpc::native
