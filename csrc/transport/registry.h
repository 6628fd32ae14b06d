#pragma once

// The transports of this build with their capabilities, and the choice of a node's transport.
// To add a transport, add a folder with its implementation and a row to the table in registry.cpp.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/tls_files.h"
#include "transport/transport.h"

namespace torchrpc {

namespace native {
class Identity;
class TlsCredentials;
}  // namespace native

/// How a node's transport is chosen and set up.
struct TransportOptions {
  /// The name of a TransportKind, or "auto" for the first of transportKinds(). Empty: the value of the environment
  /// variable TORCHRPC_TRANSPORT, else "auto". All workers of a group must use the same transport.
  std::string kind;
  /// Names of TensorPipe's transports and channels, as scripts for torch list them. The lists do not select TensorPipe.
  /// If the default kind is chosen, "shm" or the name of that kind in `transports` permits shared memory, and a list
  /// with neither, but with "uv" or "ibv", selects TCP.
  std::optional<std::vector<std::string>> transports;
  std::optional<std::vector<std::string>> channels;
  std::string host;  ///< this and the next: as in HostChoice
  std::string rendezvous_host;
  std::string node_name;
  std::string secret;         ///< of the group; empty if there is none. Only for transports that authenticate.
  std::string identity_file;  ///< given by the user; makeTransport() does not read it
  std::shared_ptr<const native::Identity> identity;  ///< of this worker, with `secret` as its secret; may be null
  TlsFiles tls;                                      ///< given by the user; makeTransport() does not read them
  std::shared_ptr<const native::TlsCredentials> tls_credentials;  ///< loaded from `tls`; null without TLS
  bool secret_is_given = false;  ///< the user has given `secret`, so it is not in the store
  /// "auto": connections over TCP are encrypted if the user has given a secret. "on": always. "off": never. Empty: the
  /// value of the environment variable TORCHRPC_ENCRYPTION, else "auto". All workers of a group must use the same.
  std::string encryption;
  std::string port;  ///< parsed by listenPorts(). Only for transports with takes_port.
  Limits limits;
};

/// The properties by which the rest of the program distinguishes transports: it never compares their names.
struct TransportCapabilities {
  bool authenticates = false;        ///< both sides of a connection prove their identity and that they know the group's
                                     ///< secret
  bool encrypts = false;             ///< frames are encrypted on the network
  bool same_host_only = false;       ///< cannot reach workers of other hosts
  bool shares_memory = false;        ///< uses shared memory between workers of one host, where the system permits it
  bool moves_device_memory = false;  ///< sends tensors of accelerators without copying them to main memory
  bool takes_port = false;           ///< listens on the port that the user gives; otherwise the system chooses it
  bool takes_backend_lists = false;  ///< reads TransportOptions::transports and channels itself
};

/// One row of the table.
struct TransportKind {
  std::string_view name;            ///< in TransportOptions::kind and TORCHRPC_TRANSPORT
  std::string_view title;           ///< in error texts
  std::string_view address_scheme;  ///< before the colon of its addresses; kinds with the same scheme can connect
  TransportCapabilities capabilities;
  std::unique_ptr<Transport> (*make)(TransportOptions options);
  /// The Python package whose function load_library() loads the library that this transport needs. Empty if it needs
  /// no package.
  std::string_view python_package{};
  /// Returns what this machine lacks for the transport, and how to install it; empty if nothing. Null if the transport
  /// works on every machine.
  std::string (*lacks)() = nullptr;
};

/// Returns the transports of this build. The first is the default.
const std::vector<TransportKind>& transportKinds();

/// Returns the kind that the options select. Throws Error(kInvalidArgument) naming the option or variable and the
/// accepted values.
const TransportKind& chooseTransport(const TransportOptions& options);

/// Makes the chosen transport. Throws as chooseTransport(), and for an option that this transport does not support.
std::unique_ptr<Transport> makeTransport(TransportOptions options);

}  // namespace torchrpc
