#pragma once

// The names and numbers of workers, calls, RRefs and forks.

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <string_view>

#include "torchrpc/worker_info.h"  // IWYU pragma: export

namespace torchrpc {

/// The largest number of workers in a group: the ids of distributed autograd have 15 bits for the rank.
constexpr int32_t kMaxWorldSize = 1 << 15;

/// Whether a worker, or a role of workers, may have this name.
bool isName(std::string_view name);
/// Throws Error(kInvalidArgument) if this is not a valid name of a worker.
void validateName(const std::string& name);
/// Throws Error(kInvalidArgument) if the name or the rank is not valid in a group of this size. `world_size` 0: the
/// group grows as workers join.
void validateSelf(const WorkerInfo& self, int32_t world_size);

/// A peer: one start of a worker. A worker that is started again under its rank is another peer.
struct PeerId {
  WorkerId worker = kNoWorker;
  uint64_t incarnation = 0;  ///< greater for each later start of the worker; 0: not known

  bool isKnown() const { return incarnation != 0; }
  /// Whether `later` is a later start of the same worker.
  bool isReplacedBy(const PeerId& later) const { return worker == later.worker && incarnation < later.incarnation; }

  friend auto operator<=>(const PeerId&, const PeerId&) = default;
};

/// The number of a call, unique among the calls of one caller process.
using CallId = uint64_t;

/// An id that is unique in the group: the worker that created it, and a number that is unique on that worker. The ids
/// of RRefs and forks also have a key, a secure random number: a worker that knows it has been given the id. toString()
/// omits the key.
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
