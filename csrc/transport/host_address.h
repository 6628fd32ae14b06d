#pragma once

// Which address a node listens on. Stands apart from TensorPipe: any transport over IP needs it.

#include <cstdint>
#include <optional>
#include <string>

namespace torchrpc {

struct HostChoice {
  std::string host;             ///< a name or an address given by the user; may be empty
  std::string rendezvous_host;  ///< where the group meets; may be empty
};

/// A numeric address of this machine. In this order: `host`; that of the interface named by TORCHRPC_SOCKET_IFNAME,
/// TP_SOCKET_IFNAME or GLOO_SOCKET_IFNAME (the first that is set; names separated by commas, the first that has an
/// address); loopback if `rendezvous_host` is "localhost" or a loopback address; that of the interface which leads
/// there, or which leads out. Never a link-local one, never loopback because something could not be resolved.
/// Throws Error(kInvalidArgument) naming the option or variable.
std::string chooseHostAddress(const HostChoice& choice);

/// A descriptor, the caller's, that listens on `port` at the one address of this machine by which peers come who meet
/// at `host`: loopback if that is "localhost" or a loopback address. Nothing if there is no such address (a name that
/// means loopback here and another address elsewhere, an address that is translated on the way), or if the port is in
/// use.
std::optional<int> listenWherePeersMeet(const std::string& host, uint16_t port);

/// Throws Error(kRendezvous) unless this machine can listen on the numeric address.
void checkCanListen(const std::string& address);

/// Whether nobody listens on "10.0.0.1:80" or "[fd00::2]:80" here; false for what is not of that form.
bool isPortFree(const std::string& address_and_port);

/// "10.0.0.1" as it is, "[fd00::2]".
std::string bracketed(const std::string& address);

}  // namespace torchrpc
