#pragma once

// The identity of a worker: plain values.
// Threads: any.

#include <cstdint>
#include <string>

namespace torchrpc {

/// A worker's rank in its group: 0 to world size - 1.
using WorkerId = int32_t;
/// The rank of no worker.
constexpr WorkerId kNoWorker = -1;

/// A worker of the group.
struct WorkerInfo {
  std::string name;         ///< the name it was started with, unique in the group
  WorkerId id = kNoWorker;  ///< its rank

  friend bool operator==(const WorkerInfo&, const WorkerInfo&) = default;
};

/// "WorkerInfo(id=0, name=worker0)": the form used in errors and logs.
std::string toString(const WorkerInfo& worker);

}  // namespace torchrpc
