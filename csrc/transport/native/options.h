#pragma once

// Options of the native transport.

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "base/timer.h"
#include "transport/port_range.h"
#include "wire/limits.h"

namespace torchrpc::native {

/// What the peer of a new connection says about itself. The handshake has shown that it knows the group's secret.
struct IdentityClaim {
  std::string_view name;            ///< of its node
  std::string_view expected_name;   ///< the one that this side connects to; empty on the side that was connected to
  std::string_view identity;        ///< what its make_identity returned
  std::string_view handshake_hash;  ///< with which that was called
};

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
  /// For groups with a secret: what proves the name of this node to the peer of the handshake with this hash (at most
  /// kMaxIdentityBytes), and what checks that of the peer, and throws Error if it is not what it should be. Empty: no
  /// proofs of names. Called on the loop thread; must not block.
  std::function<std::string(std::string_view handshake_hash)> make_identity;
  std::function<void(const IdentityClaim&)> check_identity;
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
