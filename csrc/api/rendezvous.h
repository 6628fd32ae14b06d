#pragma once

// Finds the group of a node of the public API, by the URLs and environment variables that Python's init_rpc reads, so
// that C++ and Python workers form one group.
// Threads: the one that starts the node.

#include <cstdint>
#include <string>

#include "agent/rendezvous.h"

namespace torchrpc::api {

struct Meeting {
  std::string url;
  WorkerId rank = kNoWorker;  ///< kNoWorker: that of the launcher
  int32_t world_size = 0;     ///< 0: the value of WORLD_SIZE, or the launcher's
  Duration timeout{};
  bool has_secret = false;  ///< the user has given one
};

/// Sets a missing rank and world size from the environment. Throws Error(kInvalidArgument), which names a missing or
/// malformed variable.
void resolve(Meeting& meeting);

/// The store at the URL. Throws Error: kInvalidArgument for a malformed URL, kRendezvous if the store cannot be reached
/// or, on rank 0, if its port is in use.
StorePtr openStore(const Meeting& meeting);

/// The part of `root` that belongs to the group that is forming there. Several groups may use one store, one after
/// another.
StorePtr enterGroup(const StorePtr& root);
/// The group of this part has formed: the next group takes another part.
void markFormed(c10d::Store& store);

}  // namespace torchrpc::api
