#pragma once

// Finds the group of a node of the public API by the same URLs and environment variables as Python's init_rpc, so that
// C++ and Python workers can form one group.
// Threads: the one that starts the node.

#include <cstdint>
#include <optional>
#include <string>

#include "group/rendezvous.h"
#include "group/store_keeper.h"

namespace torchrpc::api {

struct Meeting {
  std::string url;
  WorkerId rank = kNoWorker;  ///< kNoWorker: the launcher's
  int32_t world_size = 0;     ///< 0: the value of WORLD_SIZE, or the launcher's
  Duration timeout{};
  bool has_secret = false;                     ///< whether the user has given a secret
  std::optional<StoreAddress> served_store{};  ///< set by openStore(): the address at which rank 0 serves the store
};

/// Sets a missing rank and world size from the environment. Throws Error(kInvalidArgument), which names a missing or
/// malformed variable.
void resolve(Meeting& meeting);

/// Opens the store at the URL. Throws Error: kInvalidArgument for a malformed URL, kRendezvous if the store cannot be
/// reached or, on rank 0, if its port is in use.
StorePtr openStore(Meeting& meeting);

}  // namespace torchrpc::api
