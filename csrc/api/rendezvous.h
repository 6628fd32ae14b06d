#pragma once

// Finds the group of a node of the public API, by the URLs and environment variables that Python's init_rpc reads, so
// that C++ and Python workers form one group.
// Threads: the one that starts the node.

#include <cstdint>
#include <optional>
#include <string>

#include "agent/rendezvous.h"
#include "agent/store_keeper.h"

namespace torchrpc::api {

struct Meeting {
  std::string url;
  WorkerId rank = kNoWorker;  ///< kNoWorker: that of the launcher
  int32_t world_size = 0;     ///< 0: the value of WORLD_SIZE, or the launcher's
  Duration timeout{};
  bool has_secret = false;                     ///< the user has given one
  std::optional<StoreAddress> served_store{};  ///< set by openStore(): where rank 0 serves it
};

/// Sets a missing rank and world size from the environment. Throws Error(kInvalidArgument), which names a missing or
/// malformed variable.
void resolve(Meeting& meeting);

/// The store at the URL. Throws Error: kInvalidArgument for a malformed URL, kRendezvous if the store cannot be reached
/// or, on rank 0, if its port is in use.
StorePtr openStore(Meeting& meeting);

}  // namespace torchrpc::api
