#pragma once

// Chooses the address of this machine on which a node listens. For every transport over IP.

#include <cstdint>
#include <optional>
#include <string>

namespace torchrpc {

struct HostChoice {
  std::string host;             ///< the name or address on which to listen, given by the user; may be empty
  std::string rendezvous_host;  ///< the host of the rendezvous (MASTER_ADDR); may be empty
};

/// Returns a numeric address of this machine, by the first of these rules that applies:
/// - `host`;
/// - the address of the interface named by TORCHRPC_SOCKET_IFNAME, TP_SOCKET_IFNAME or GLOO_SOCKET_IFNAME (the first
///   that is set; of names separated by commas, the first interface that has an address);
/// - loopback, if `rendezvous_host` is "localhost" or a loopback address;
/// - the address of the interface with the route to `rendezvous_host`;
/// - without a `rendezvous_host`, or if it is an address at which a server listens on all interfaces (0.0.0.0 or ::):
///   the address of the interface with the default route or, without such a route, of the first interface.
/// Never returns a link-local address, and never falls back to loopback if a name cannot be resolved.
/// Throws Error(kInvalidArgument) naming the option or variable.
std::string chooseHostAddress(const HostChoice& choice);

/// Whether the configuration requires loopback: by `host`, by the interface that a variable names or, if neither is
/// given, by a `rendezvous_host` that is "localhost" or a loopback address. If so, all workers of the group are on this
/// machine. Throws as chooseHostAddress().
bool mustListenOnLoopback(const HostChoice& choice);

/// Listens on `port` at the one address of this machine at which workers reach the rendezvous at `host`: loopback if
/// `host` is "localhost" or a loopback address. Returns the descriptor, which the caller owns. Returns nullopt if there
/// is no such address (e.g. a name that resolves to loopback here and to another address elsewhere, or a translated
/// address), or if the port is in use.
std::optional<int> listenAtRendezvousHost(const std::string& host, uint16_t port);

/// Throws Error(kRendezvous) unless this machine can listen on the numeric address.
void checkCanListen(const std::string& address);

/// Whether no process of this machine listens at that address, e.g. "10.0.0.1:80" or "[fd00::2]:80". False for
/// malformed text.
bool isPortFree(const std::string& address_and_port);

/// Returns "[fd00::2]" for "fd00::2", and "10.0.0.1" unchanged.
std::string bracketed(const std::string& address);

}  // namespace torchrpc
