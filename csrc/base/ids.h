#pragma once

// The names and numbers of workers, calls, RRefs and forks.

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>

#include "torchrpc/worker_info.h"  // IWYU pragma: export

namespace torchrpc {

/// Throws Error(kInvalidArgument) if no worker can have this name.
void validateName(const std::string& name);
/// Throws Error(kInvalidArgument) if no worker can have this name and rank in a group of this size. `world_size` 0: the
/// group grows.
void validateSelf(const WorkerInfo& self, int32_t world_size);

/// The number of a call: unique on its caller, while that process lives.
using CallId = uint64_t;

/// Unique in the group: the worker that created it, and a number of that worker. RRefs and forks also have a key, which
/// is secure and random: who knows it has been given the id. Texts do not show it.
struct GloballyUniqueId {
  WorkerId created_on = kNoWorker;
  uint64_t local_id = 0;
  uint64_t key = 0;

  friend bool operator==(const GloballyUniqueId&, const GloballyUniqueId&) = default;
  friend auto operator<=>(const GloballyUniqueId&, const GloballyUniqueId&) = default;
};

/// "GloballyUniqueId(created_on=0, local_id=3)"
std::string toString(const GloballyUniqueId& id);
std::ostream& operator<<(std::ostream& out, const GloballyUniqueId& id);

/// The id of a value that RRefs refer to.
using RRefId = GloballyUniqueId;
/// The id of one user's reference to it.
using ForkId = GloballyUniqueId;

}  // namespace torchrpc

template <>
struct std::hash<torchrpc::GloballyUniqueId> {
  size_t operator()(const torchrpc::GloballyUniqueId& id) const noexcept {
    // Fibonacci hashing of the number, which may be a counter, with the worker in the high bits.
    return (id.local_id ^ id.key ^ (static_cast<uint64_t>(static_cast<uint32_t>(id.created_on)) << 40)) *
        0x9E3779B97F4A7C15ull;
  }
};
