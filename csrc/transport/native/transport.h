#pragma once

// Our own transport: TCP between hosts, Unix sockets and shared memory within one. One thread, one listening socket
// (two where Unix sockets are used), one connection a pair of workers.

#include <cstdint>
#include <memory>
#include <string>

#include "base/timer.h"
#include "transport/transport.h"

namespace torchrpc::native {

/// Both 0: whichever the system chooses.
struct PortRange {
  uint16_t first = 0, last = 0;
};

struct Options {
  /// As in TensorPipeOptions: the address to listen on and to be reached at, and where the group meets.
  std::string host;
  std::string rendezvous_host;
  std::string node_name;
  /// Opaque; peers that say another are refused. At most 1,024 bytes.
  std::string group;
  /// That both sides of every connection must prove to know, before anything of theirs is read; empty: none.
  std::string secret;
  PortRange ports;            ///< to listen on: the first that is free
  bool unix_sockets = true;   ///< between workers of one host
  bool shared_memory = true;  ///< beside Unix sockets
  bool blocks = true;         ///< where there is shared memory: large tensors stay in it, rather than pass through
  Duration handshake_deadline = std::chrono::seconds(10);
  size_t max_pending_handshakes = 256;  ///< that may be in the middle of a handshake; the oldest goes
  /// How long threads that wait look for news themselves before they sleep; see Note [Spinning]. Zero: never.
  Duration longest_spin = std::chrono::microseconds(100);
  Limits limits;
};

std::unique_ptr<Transport> makeTransport(Options options);

}  // namespace torchrpc::native
