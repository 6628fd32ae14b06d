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

/// The host of "tcp://host:port"; for any other URL that of findMeetingPlace().
std::string rendezvousHost(const std::string& url);

/// The transport that `options.transport` describes. Completes that: its node name and its rendezvous host come from
/// the other options; its identity, its secret and its TLS credentials from the options, a file or the environment, and
/// without a secret see groupSecret(). Logs who can join the group if neither was given. Blocks on the store. Throws
/// Error: kInvalidArgument as makeTransport does, kRendezvous.
std::unique_ptr<Transport> makeGroupTransport(Node::Options& options, c10d::Store& store);

/// The transport of a tool that asks workers what they do. The secret, the identity or the certificate that the user
/// has given are in `transport` or the environment, as a worker's. `group_secret`: of a group whose user has given
/// none. Throws Error(kInvalidArgument).
std::unique_ptr<Transport> makeObserverTransport(TransportOptions transport, const std::string& group_secret);

}  // namespace torchrpc
