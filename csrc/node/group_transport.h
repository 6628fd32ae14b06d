#pragma once

// The transport of a worker, set up for its group: the rendezvous decides on which address the worker listens, and the
// store holds the group's secret. Used by Python's nodes and by those of the C++ API.
// Called by the thread that starts the node.

#include <memory>
#include <string>

#include "transport/registry.h"

namespace c10d {
class Store;
}

namespace torchrpc {

/// The host of "tcp://host:port"; for any other URL the value of MASTER_ADDR, empty if that is not set.
std::string rendezvousHost(const std::string& url);

/// Makes the transport that `options` choose, with two options completed: `rendezvous_host` from `url`, the URL at
/// which the group meets; `secret`, if the transport authenticates, from a file, the environment or the store. May
/// block on the store. Throws Error: kInvalidArgument as makeTransport and givenSecret, kRendezvous as groupSecret.
std::unique_ptr<Transport> makeGroupTransport(TransportOptions options, c10d::Store& store, const std::string& url);

}  // namespace torchrpc
