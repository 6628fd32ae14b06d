#pragma once

// The transport of a worker, as its group wants it: where the group meets says where to listen, and the store what
// secret there is. Python's nodes and those of the C++ API come here, each on the thread that starts it.

#include <memory>
#include <string>

#include "transport/registry.h"

namespace c10d {
class Store;
}

namespace torchrpc {

/// The host of "tcp://host:port"; for any other URL what MASTER_ADDR says; perhaps empty.
std::string rendezvousHost(const std::string& url);

/// `options` completed: `rendezvous_host` by `url`, where the group meets; `secret` by what was given there, by file or
/// by environment, else by the store. Asks the store. Throws Error: kInvalidArgument as makeTransport, kRendezvous.
std::unique_ptr<Transport> makeGroupTransport(TransportOptions options, c10d::Store& store, const std::string& url);

}  // namespace torchrpc
