#pragma once

// Options of the native transport.

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "base/timer.h"
#include "transport/port_range.h"
#include "wire/limits.h"

namespace torchrpc::native {

class Identity;
class TlsCredentials;

struct Options {
  std::string host;  ///< this and the next: as in HostChoice
  std::string rendezvous_host;
  std::string node_name;  ///< in error texts of peers
  std::string group;      ///< opaque; a peer with another value is refused; at most 1,024 bytes
  /// Both sides of every connection prove that they know it before either reads a frame. Empty: no authentication.
  std::string secret;
  /// Connections over TCP are encrypted. Needs a secret. All workers of a group must have the same.
  bool encrypt = false;
  bool aes = true;                 ///< with AES where both processors have it, else with ChaCha20
  std::string encryption = "off";  ///< the user's setting, from which that follows; for error texts
  /// This node's; its secret is `secret`. Peers must have one, too. Null: peers' names are taken on trust.
  std::shared_ptr<const Identity> identity;
  /// This node's for TLS, which then encrypts connections over TCP, and proves names over all. Peers must use TLS, too.
  std::shared_ptr<const TlsCredentials> tls;
  PortRange ports;            ///< to listen on: the first that is free
  bool unix_sockets = true;   ///< between workers of one host, instead of TCP
  bool shared_memory = true;  ///< rings in shared memory beside the Unix sockets
  bool slabs = true;          ///< slabs in shared memory for large tensors, which then bypass the rings
  Duration handshake_deadline = std::chrono::seconds(10);
  size_t max_pending_handshakes = 256;    ///< of inbound connections; one more closes the oldest
  size_t max_connections_per_peer = 256;  ///< that one worker may open to this one
  /// The longest time that a waiting thread polls before it parks: see Note [Busy polling]. Zero: it never polls.
  Duration spin_budget = std::chrono::microseconds(100);
  Limits limits;
};

/// Options::spin_budget as the environment variable TORCHRPC_SPIN_US sets it, in microseconds; else the default.
/// Throws Error(kInvalidArgument) naming the variable.
Duration spinDuration();

}  // namespace torchrpc::native
