#pragma once

// The numbers that name workers, calls, RRefs and forks.

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>

#include "torchrpc/worker_info.h"  // IWYU pragma: export

namespace torchrpc {

/// A call, unique on the caller while the caller lives.
using CallId = uint64_t;

/// Unique in the group: the worker that made the number, and a counter of its own.
struct GloballyUniqueId {
  WorkerId created_on = kNoWorker;
  uint64_t local_id = 0;

  friend bool operator==(const GloballyUniqueId&, const GloballyUniqueId&) = default;
  friend auto operator<=>(const GloballyUniqueId&, const GloballyUniqueId&) = default;
};

/// "GloballyUniqueId(created_on=0, local_id=3)"
std::string toString(const GloballyUniqueId& id);
std::ostream& operator<<(std::ostream& out, const GloballyUniqueId& id);

/// One per value that RRefs refer to.
using RRefId = GloballyUniqueId;
/// One per user's reference to it.
using ForkId = GloballyUniqueId;

}  // namespace torchrpc

template <>
struct std::hash<torchrpc::GloballyUniqueId> {
  size_t operator()(const torchrpc::GloballyUniqueId& id) const noexcept {
    // Fibonacci hashing of the counter, with the worker in the high bits.
    return (id.local_id ^ (static_cast<uint64_t>(static_cast<uint32_t>(id.created_on)) << 40)) * 0x9E3779B97F4A7C15ull;
  }
};
