#pragma once

// The transports of this build with their capabilities, and the choice of a node's transport.
// A new transport is a folder with its implementation and a row of the table in registry.cpp.

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
  /// Names of TensorPipe's transports and channels, as scripts for torch list them. They do not choose TensorPipe: for
  /// other kinds "shm" or the name of the default kind in `transports` permits shared memory, and a list with neither
  /// of them, but with "uv" or "ibv", means TCP.
  std::optional<std::vector<std::string>> transports;
  std::optional<std::vector<std::string>> channels;
  std::string host;  ///< this and the next: as in HostChoice
  std::string rendezvous_host;
  std::string node_name;
  std::string secret;         ///< the group's; empty: none. Only for transports that authenticate.
  std::string identity_file;  ///< the user's; makeTransport() does not read it
  std::shared_ptr<const native::Identity> identity;  ///< of this worker; its secret is `secret`. Null: none
  TlsFiles tls;                                      ///< the user's; makeTransport() does not read them
  std::shared_ptr<const native::TlsCredentials> tls_credentials;  ///< of these. Null: no TLS
  bool secret_is_given = false;                                   ///< the user has given it, so that it is in no store
  /// "auto": connections over TCP are encrypted if the user has given a secret. "on": always. "off": never. Empty: the
  /// value of the environment variable TORCHRPC_ENCRYPTION, else "auto". All workers of a group must have the same.
  std::string encryption;
  std::string port;  ///< as listenPorts() reads it. Only for transports that take a port.
  Limits limits;
};

/// The properties by which the rest of the program distinguishes transports: it never compares their names.
struct TransportCapabilities {
  bool authenticates = false;        ///< both sides of a connection prove that they know the group's secret, and who
                                     ///< they are
  bool encrypts = false;             ///< frames are encrypted on the network
  bool same_host_only = false;       ///< cannot reach workers of other hosts
  bool shares_memory = false;        ///< uses shared memory between workers of one host, where the system permits it
  bool moves_device_memory = false;  ///< sends tensors of accelerators without a copy in main memory
  bool takes_port = false;           ///< listens on the port that the user gives; otherwise the system chooses it
  bool takes_backend_lists = false;  ///< reads TransportOptions::transports and channels itself
};

/// One row of the table.
struct TransportKind {
  std::string_view name;            ///< in TransportOptions::kind and TORCHRPC_TRANSPORT
  std::string_view title;           ///< in error texts
  std::string_view address_scheme;  ///< its addresses begin with this and a colon; kinds with the same can connect
  TransportCapabilities capabilities;
  std::unique_ptr<Transport> (*make)(TransportOptions options);
  /// The Python package whose function load_library() loads the library that this transport needs; empty: none.
  std::string_view python_package{};
  /// What this machine lacks for the transport, and how to install it, or an empty text. Null: every machine has it.
  std::string (*lacks)() = nullptr;
};

/// The transports of this build; the first is the default.
const std::vector<TransportKind>& transportKinds();

/// The kind that these options choose. Throws Error(kInvalidArgument) naming the option or variable and the accepted
/// values.
const TransportKind& chooseTransport(const TransportOptions& options);

/// Makes the chosen transport. Throws as chooseTransport, and for an option that this transport does not support.
std::unique_ptr<Transport> makeTransport(TransportOptions options);

}  // namespace torchrpc
