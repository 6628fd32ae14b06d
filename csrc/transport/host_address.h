#pragma once

// Addresses of this machine: on which one a node listens. For every transport over IP.

#include <cstdint>
#include <optional>
#include <string>

namespace torchrpc {

struct HostChoice {
  std::string host;             ///< the name or address on which to listen, given by the user; may be empty
  std::string rendezvous_host;  ///< the host of the rendezvous (MASTER_ADDR); may be empty
};

/// A numeric address of this machine. The first of these that applies:
/// - `host`;
/// - the address of the interface named by TORCHRPC_SOCKET_IFNAME, TP_SOCKET_IFNAME or GLOO_SOCKET_IFNAME (the first
///   that is set; of names separated by commas, the first interface that has an address);
/// - loopback, if `rendezvous_host` is "localhost" or a loopback address;
/// - the address of the interface with the route to `rendezvous_host`, or with the default route.
/// Never a link-local address. Never loopback because a name could not be resolved.
/// Throws Error(kInvalidArgument) naming the option or variable.
std::string chooseHostAddress(const HostChoice& choice);

/// Whether the worker was told to listen on loopback: by `host`, by the interface that a variable names or, if neither
/// is given, by a `rendezvous_host` that is "localhost" or a loopback address. Then all workers of its group are on
/// this machine. Throws as chooseHostAddress.
bool mustListenOnLoopback(const HostChoice& choice);

/// A descriptor, owned by the caller, that listens on `port` at the one address of this machine at which workers reach
/// the rendezvous at `host`: loopback if that is "localhost" or a loopback address. Nothing if there is no such address
/// (e.g. a name that resolves to loopback here and to another address elsewhere, or a translated address), or if the
/// port is in use.
std::optional<int> listenAtRendezvousHost(const std::string& host, uint16_t port);

/// Throws Error(kRendezvous) unless this machine can listen on the numeric address.
void checkCanListen(const std::string& address);

/// Whether no process listens on "10.0.0.1:80" or "[fd00::2]:80" here; false for text of another form.
bool isPortFree(const std::string& address_and_port);

/// "10.0.0.1" unchanged, "[fd00::2]" for "fd00::2".
std::string bracketed(const std::string& address);

}  // namespace torchrpc
