#pragma once

// The transport of a worker of a group: the group's rendezvous determines the interface to listen on, and its store
// holds the group's secret.

#include <memory>
#include <string>

#include "node/node.h"

namespace c10d {
class Store;
}

namespace torchrpc {

/// Makes the transport that `options.transport` describes. First completes that: the node name and the rendezvous host
/// come from the other options; the identity, the secret and the TLS credentials come from the options, a file or the
/// environment. If no secret is given, groupSecret() determines it. Logs who can join the group if neither a secret nor
/// a certificate was given. Blocks on the store. Throws Error: kInvalidArgument as makeTransport does, kRendezvous.
std::unique_ptr<Transport> makeGroupTransport(Node::Options& options, c10d::Store& store);

/// Makes the transport of a tool that inspects workers. The secret, the identity or the certificate that the user has
/// given is in `transport` or the environment, as for a worker. `group_secret` is used if the user has given none.
/// Throws Error(kInvalidArgument).
std::unique_ptr<Transport> makeObserverTransport(TransportOptions transport, const std::string& group_secret);

}  // namespace torchrpc
