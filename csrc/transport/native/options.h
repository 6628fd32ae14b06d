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
  std::string host;  ///< this and the next field: as in HostChoice
  std::string rendezvous_host;
  std::string node_name;  ///< sent to peers in the handshake, for checks and error texts
  std::string group;      ///< opaque, at most 1,024 bytes; a peer with another value is refused
  /// Both sides of every connection prove that they know it before either reads a frame. Empty: no authentication.
  std::string secret;
  /// Whether connections over TCP are encrypted. Needs a secret. All workers of a group must have the same value.
  bool encrypt = false;
  bool aes = true;                 ///< encrypt with AES if both processors support it, else with ChaCha20
  std::string encryption = "off";  ///< the user's setting, from which `encrypt` was derived; for error texts
  /// The identity of this node, which contains `secret`. Peers must have one, too. Null: peers need not prove their
  /// names, except by `tls`.
  std::shared_ptr<const Identity> identity;
  /// The TLS credentials of this node. TLS then encrypts connections over TCP, and proves names over TCP and Unix
  /// sockets. Peers must use TLS, too.
  std::shared_ptr<const TlsCredentials> tls;
  PortRange ports;            ///< the node listens on the first that is free
  bool unix_sockets = true;   ///< used between workers of one host, instead of TCP
  bool shared_memory = true;  ///< rings in shared memory beside the Unix sockets
  bool slabs = true;          ///< slabs in shared memory for large tensors, which then bypass the rings
  Duration handshake_deadline = std::chrono::seconds(10);
  size_t max_pending_handshakes = 256;    ///< of inbound connections; a further one closes the oldest
  size_t max_connections_per_peer = 256;  ///< that one worker may open to this one
  /// The longest time that a waiting thread polls before it parks: see Note [Busy polling]. Zero: threads never poll.
  Duration spin_budget = std::chrono::microseconds(100);
  Limits limits;
};

/// Returns the value for Options::spin_budget: the environment variable TORCHRPC_SPIN_US, in microseconds, if it is
/// set, else the default. Throws Error(kInvalidArgument), which names the variable, for a malformed value.
Duration spinDuration();

}  // namespace torchrpc::native
