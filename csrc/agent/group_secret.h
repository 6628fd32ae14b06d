#pragma once

// The secret that the workers of a group share. You give it to all workers, or the first worker creates it and the
// store distributes it. A process that finds the port of a worker, but cannot reach the store, does not learn it. Used
// by the thread that starts the node only; the store blocks.

#include <string>

namespace c10d {
class Store;
}

namespace torchrpc {

/// The secret that the user has given: `option`, else the contents of the file that TORCHRPC_SECRET_FILE names (without
/// the line break at its end), else TORCHRPC_SECRET; empty if there is none. Throws Error(kInvalidArgument) for a
/// secret that is too short, or too long; for a file that others than its owner may read, or that cannot be read.
std::string givenSecret(const std::string& option);

/// The secret of the group that meets at `store`: `given`, which is not written to the store, or the one in the store.
/// Throws Error(kRendezvous) if only some workers of the group were given a secret.
std::string groupSecret(c10d::Store& store, const std::string& given, const std::string& self);

}  // namespace torchrpc
