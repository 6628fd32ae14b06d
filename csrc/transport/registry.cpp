#include "transport/registry.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "transport/native/options.h"
#include "transport/native/transport.h"
#include "transport/port_range.h"
#ifndef TORCHRPC_WITHOUT_TENSORPIPE
#include "transport/tensorpipe/transport.h"
#endif
#ifndef TORCHRPC_WITHOUT_UCX
#include "transport/ucx/transport.h"
#endif

namespace torchrpc {

namespace {

constexpr std::string_view kAuto = "auto";
constexpr std::string_view kTcp = "tcp";

constexpr std::string_view kMissingKinds =
#ifdef TORCHRPC_WITHOUT_TENSORPIPE
    "; 'tensorpipe' is not in this torchrpc, which was built without TensorPipe"
#endif
#ifdef TORCHRPC_WITHOUT_UCX
    "; 'ucx' is not in this torchrpc, which was built without the headers of UCX"
#endif
    "";

/// Returns the setting of `option` or, if it is empty, of the environment variable. Throws Error(kInvalidArgument)
/// naming the option or the variable.
std::string encryptionSetting(const std::string& option) {
  const char* variable = std::getenv("TORCHRPC_ENCRYPTION");
  const bool from_variable = option.empty() && variable && *variable;
  const auto setting = from_variable ? variable : option.empty() ? std::string(kAuto) : option;
  if (setting == kAuto || setting == "on" || setting == "off") return setting;
  throw Error(
      ErrorCode::kInvalidArgument,
      (from_variable ? "TORCHRPC_ENCRYPTION" : "the option encryption") + (" is '" + setting) +
          "': it can be 'auto', 'on' or 'off'");
}

template <bool kUnixSockets>
std::unique_ptr<Transport> makeNative(TransportOptions options) {
  const auto& encryption = options.encryption;
  const bool encrypts = encryption == "on" || (encryption == kAuto && options.secret_is_given);
  return native::makeTransport(
      {.host = std::move(options.host),
       .rendezvous_host = std::move(options.rendezvous_host),
       .node_name = std::move(options.node_name),
       .secret = std::move(options.secret),
       .encrypt = encrypts && !options.tls_credentials,  // with credentials, TLS encrypts
       .encryption = encryption,
       .identity = std::move(options.identity),
       .tls = std::move(options.tls_credentials),
       .ports = listenPorts(options.port),
       .unix_sockets = kUnixSockets,
       .spin_budget = native::spinDuration(),
       .limits = options.limits});
}

#ifndef TORCHRPC_WITHOUT_TENSORPIPE
std::unique_ptr<Transport> makeTensorPipe(TransportOptions options) {
  return makeTensorPipeTransport(
      {.transports = std::move(options.transports),
       .channels = std::move(options.channels),
       .host = std::move(options.host),
       .rendezvous_host = std::move(options.rendezvous_host),
       .node_name = std::move(options.node_name),
       .limits = options.limits});
}
#endif

#ifndef TORCHRPC_WITHOUT_UCX
std::unique_ptr<Transport> makeUcx(TransportOptions options) {
  return ucx::makeUcxTransport(
      {.host = std::move(options.host),
       .rendezvous_host = std::move(options.rendezvous_host),
       .ports = listenPorts(options.port),
       .limits = options.limits});
}
#endif

}  // namespace

const std::vector<TransportKind>& transportKinds() {
  // Native is the default: its small calls are several times faster than TensorPipe's, it sleeps when it is idle, and
  // unauthenticated peers cannot bring it down (benchmarks/README.md).
  static const std::vector<TransportKind> kinds = {
      {.name = "native",
       .title = "the native transport",
       .address_scheme = "native",
       .capabilities = {.authenticates = true, .encrypts = true, .shares_memory = true, .takes_port = true},
       .make = &makeNative</*kUnixSockets=*/true>},
      // The native transport over TCP only, also between workers of one host.
      {.name = kTcp,
       .title = "the native transport over TCP",
       .address_scheme = "native",
       .capabilities = {.authenticates = true, .encrypts = true, .takes_port = true},
       .make = &makeNative</*kUnixSockets=*/false>},
#ifndef TORCHRPC_WITHOUT_TENSORPIPE
      {.name = "tensorpipe",
       .title = "TensorPipe",
       .address_scheme = "tensorpipe",
       .capabilities = {.shares_memory = true, .takes_backend_lists = true},
       .make = &makeTensorPipe},
#endif
#ifndef TORCHRPC_WITHOUT_UCX
      {.name = "ucx",
       .title = "UCX",
       .address_scheme = "ucx",
       .capabilities = {.takes_port = true},
       .make = &makeUcx,
       .python_package = "libucx",
       .lacks = &ucx::whatUcxLacks},
#endif
  };
  return kinds;
}

namespace {

const TransportKind& defaultKind() { return transportKinds().front(); }

const TransportKind* findKind(std::string_view name) {
  const auto& kinds = transportKinds();
  const auto found = std::ranges::find(kinds, name, &TransportKind::name);
  return found == kinds.end() ? nullptr : &*found;
}

/// Returns e.g. "'auto', 'native', 'tcp' or 'tensorpipe'".
std::string acceptedNames() {
  auto text = "'" + std::string(kAuto) + "'";
  for (const auto& kind : transportKinds()) {
    text += (&kind == &transportKinds().back() ? " or '" : ", '") + std::string(kind.name) + "'";
  }
  return text;
}

std::string useDefault(std::string_view how) {
  return ": use " + std::string(defaultKind().title) + std::string(how) +
      "TORCHRPC_TRANSPORT=" + std::string(defaultKind().name);
}

/// Returns the kind for a list of TensorPipe's transports: the list permits shared memory or only TCP between workers
/// of one host.
const TransportKind& kindForMedia(const std::vector<std::string>& transports) {
  const auto lists = [&](std::string_view name) { return std::ranges::find(transports, name) != transports.end(); };
  if (lists("shm") || lists(defaultKind().name)) return defaultKind();
  if (lists("uv") || lists("ibv")) return *findKind(kTcp);
  std::string names;
  for (const auto& name : transports) names += (names.empty() ? "'" : ", '") + name + "'";
  throwInvalidArgument(
      "_transports lists " + (names.empty() ? "nothing" : names) + ": list 'shm' for shared memory, 'uv' for TCP, or " +
      "leave the option out for both");
}

}  // namespace

const TransportKind& chooseTransport(const TransportOptions& options) {
  auto name = options.kind;
  std::string source = "the option transport";
  if (name.empty()) {
    const char* variable = std::getenv("TORCHRPC_TRANSPORT");
    if (variable && *variable) name = variable, source = "TORCHRPC_TRANSPORT";
  }
  const auto* kind = name.empty() || name == kAuto ? &defaultKind() : findKind(name);
  if (!kind) {
    throw Error(
        ErrorCode::kInvalidArgument,
        source + " is '" + name + "': it can be " + acceptedNames() + std::string(kMissingKinds));
  }
  return kind == &defaultKind() && options.transports ? kindForMedia(*options.transports) : *kind;
}

std::unique_ptr<Transport> makeTransport(TransportOptions options) {
  const auto& kind = chooseTransport(options);
  const std::string title(kind.title);
  if (!options.secret.empty() && !kind.capabilities.authenticates) {
    throw Error(
        ErrorCode::kInvalidArgument,
        std::string(options.identity ? "an identity" : "a secret") + " was given, which " + title + " cannot prove" +
            useDefault(" (") + "), or give no secret");
  }
  if (options.tls_credentials && !kind.capabilities.authenticates) {
    throwInvalidArgument(
        "a TLS certificate was given, but " + title + " has no TLS" + useDefault(" (") + "), or give no certificate");
  }
  options.encryption = encryptionSetting(options.encryption);
  if (options.tls_credentials && options.encryption == "off") {
    throwInvalidArgument(
        "encryption is 'off', but a TLS certificate was given, and TLS encrypts: set the option encryption or "
        "TORCHRPC_ENCRYPTION to 'auto' or 'on', or give no certificate");
  }
  if (options.encryption == "on" && !kind.capabilities.encrypts) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "encryption is 'on', but " + title + " does not encrypt" + useDefault(" (") +
            "), or set the option encryption or TORCHRPC_ENCRYPTION to 'auto' or 'off'");
  }
  if (!kind.capabilities.takes_port && listenPorts(options.port) != PortRange()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "a port was given, but " + title + " listens where the system chooses: use " +
            std::string(defaultKind().title) + ", or leave out the option port and TORCHRPC_PORT");
  }
  return kind.make(std::move(options));
}

}  // namespace torchrpc
