#pragma once

// How a node of the public API finds its group: the URLs and environment variables that Python's init_rpc reads, so
// that workers of both kinds meet. Only the thread that starts the node comes here.

#include <cstdint>
#include <string>

#include "agent/rendezvous.h"

namespace torchrpc::api {

struct Meeting {
  std::string url;
  WorkerId rank = kNoWorker;  ///< kNoWorker: what RANK says
  int32_t world_size = 0;     ///< 0: what WORLD_SIZE says
  Duration timeout{};
};

/// Fills in what the environment says. Throws Error(kInvalidArgument) naming what is missing.
void resolve(Meeting& meeting);

/// The store at the URL. Throws Error: kInvalidArgument for a URL that cannot be, kRendezvous if there is no way to the
/// store, or (rank 0) its port is in use.
StorePtr openStore(const Meeting& meeting);

/// The part of `root` that belongs to the group now forming there: groups may follow one another on one store.
StorePtr enterGroup(StorePtr root);
/// The group has come up: the next one must take another part.
void markFormed(c10d::Store& store);

}  // namespace torchrpc::api
