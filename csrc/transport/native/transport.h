#pragma once

// torchrpc's own transport: TCP between hosts, Unix sockets and shared memory within a host. It has one thread, one
// listening socket (two where Unix sockets are used), and one connection per pair of workers.

#include <cstdint>
#include <memory>
#include <string>

#include "base/timer.h"
#include "transport/transport.h"

namespace torchrpc::native {

/// Both 0: the system chooses the port.
struct PortRange {
  uint16_t first = 0, last = 0;
};

struct Options {
  /// As in TensorPipeOptions: the address to listen on, which is also given to peers, and the host of the rendezvous.
  std::string host;
  std::string rendezvous_host;
  std::string node_name;
  /// Opaque; peers of another group are refused. At most 1,024 bytes.
  std::string group;
  /// Both sides of a connection must prove that they know it before a frame of theirs is read; empty: none.
  std::string secret;
  PortRange ports;            ///< listens on the first that is free
  bool unix_sockets = true;   ///< used between workers of one host
  bool shared_memory = true;  ///< used in addition to Unix sockets
  bool blocks = true;         ///< with shared memory: large tensors stay in slabs and bypass the rings
  Duration handshake_deadline = std::chrono::seconds(10);
  size_t max_pending_handshakes = 256;  ///< accepted sockets; beyond, the oldest is closed
  /// How long a thread that waits for a message polls before it sleeps; see Note [Busy polling]. Zero: never.
  Duration longest_spin = std::chrono::microseconds(100);
  Limits limits;
};

std::unique_ptr<Transport> makeTransport(Options options);

}  // namespace torchrpc::native
