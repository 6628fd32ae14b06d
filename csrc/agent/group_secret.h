#pragma once

// The secret that the workers of a group share, and how each comes to it: given to all by hand, or made by the first to
// come and handed round through the store, so that who finds a worker's port but not the store is no member.
// Only the thread that starts the node comes here; the store blocks.

#include <string>

#include "agent/worker_directory.h"

namespace torchrpc {

/// The secret that was given: `option`, else the contents of the file that TORCHRPC_SECRET_FILE names (without the line
/// break at its end), else TORCHRPC_SECRET; empty if none. Throws Error(kInvalidArgument) for a secret that could be
/// guessed, and for a file that others may read or that cannot be read.
std::string givenSecret(const std::string& option);

/// The secret of the group that meets at `store`: `given` (which does not go there), or the store's own. Throws
/// Error(kRendezvous) if some workers have been given one and others not.
std::string groupSecret(c10d::Store& store, const std::string& given, const std::string& self);

}  // namespace torchrpc
