#include "node/group_transport.h"

#include <unistd.h>

#include "base/log.h"
#include "group/group_secret.h"
#include "node/launcher.h"
#include "transport/host_address.h"
#include "transport/native/auth/identity.h"
#include "transport/native/auth/tls_credentials.h"

namespace torchrpc {

namespace {

/// Logs who can join a group without a secret. The line is a warning on rank 0 if other machines may reach the group.
void logWhoCanJoin(const Node::Options& options, GroupSecret::Source source, bool authenticates) {
  if (options.transport.tls_credentials) return;  // only workers with a certificate can join
  const bool is_local = source == GroupSecret::Source::kUser;
  const bool has_file = authenticates && options.rendezvous.starts_with("file:");
  const bool is_warning =
      !is_local && !has_file && options.agent.self.id == 0 && !options.transport.rendezvous_host.empty();
  log(is_warning ? LogLevel::kWarning : LogLevel::kInfo,
      "the group of " + options.agent.self.name + " was given no secret: whoever " +
          (!authenticates ? "reaches a port of its workers"
               : is_local ? "runs as this user on this machine"
               : has_file ? "may read the file of " + options.rendezvous
                          : "reaches its store") +
          " can join it and call its workers. To change that, give all workers the same " +
          (authenticates ? "TORCHRPC_SECRET_FILE or TORCHRPC_SECRET"
                         : "TORCHRPC_SECRET_FILE, and TORCHRPC_TRANSPORT=native, which authenticates workers"));
}

/// Sets the secret, the identity and the TLS certificate that the user has given. `is_observer`: the transport belongs
/// to a tool, not to a worker.
void completeGiven(TransportOptions& transport, bool is_observer = false) {
  transport.identity = givenIdentity(transport.identity_file);
  if (is_observer && transport.identity) transport.node_name = transport.identity->holder().name;
  transport.tls = givenTls(transport.tls);
  if (transport.tls.isGiven()) {
    if (transport.identity) {
      throw Error(
          ErrorCode::kInvalidArgument,
          "both an identity and a TLS certificate were given, and either says who a worker is: give one of them");
    }
    transport.tls_credentials = std::make_shared<const native::TlsCredentials>(transport.tls);
  }
  if (!transport.identity) {
    transport.secret = givenSecret(transport.secret);
    return;
  }
  if (!transport.secret.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "an identity has the group's secret: give no other secret beside it");
  }
  if (const auto& name = transport.identity->holder().name; name != transport.node_name) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "the identity of worker " + name + " was given to worker " + transport.node_name +
            ": give each worker its own, which `torchrpc keygen` makes");
  }
  transport.secret = transport.identity->secret();
}

/// Throws Error(kInvalidArgument) if what a caller may run depends on its name, but names are not verified.
void requireIdentities(const Node::Options& options) {
  if (options.transport.identity || options.transport.tls_credentials) return;
  for (const auto& allowance : options.allowed_functions) {
    if (allowance.workers == kAllNames) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        "allowed_functions has functions for workers named '" + allowance.workers +
            "', but without identities any worker can take any name. Make identities with `torchrpc keygen`, and give "
            "each worker its own by TORCHRPC_IDENTITY_FILE or the option identity; or give TLS certificates; or give "
            "one list for all workers");
  }
}

}  // namespace

std::unique_ptr<Transport> makeObserverTransport(TransportOptions transport, const std::string& group_secret) {
  transport.node_name = "observer " + std::to_string(::getpid());
  completeGiven(transport, /*is_observer=*/true);
  transport.secret_is_given = !transport.secret.empty();
  if (!transport.secret_is_given) transport.secret = group_secret;
  return makeTransport(std::move(transport));
}

std::unique_ptr<Transport> makeGroupTransport(Node::Options& options, c10d::Store& store) {
  auto& transport = options.transport;
  transport.node_name = options.agent.self.name;
  transport.rendezvous_host = rendezvousHost(options.rendezvous);
  completeGiven(transport);
  requireIdentities(options);
  transport.secret_is_given = !transport.secret.empty();
  const HostChoice choice{.host = transport.host, .rendezvous_host = transport.rendezvous_host};
  const bool are_local = mustListenOnLoopback(choice);
  if (chooseTransport(transport).capabilities.authenticates) {
    auto secret = groupSecret(store, transport.secret, are_local, transport.node_name);
    transport.secret = std::move(secret.bytes);
    options.stored_secret = std::move(secret.stored);
    if (secret.source != GroupSecret::Source::kGiven) logWhoCanJoin(options, secret.source, true);
  } else if (transport.secret.empty() && !are_local) {
    logWhoCanJoin(options, GroupSecret::Source::kStore, false);
  }
  return makeTransport(transport);
}

}  // namespace torchrpc
