#pragma once

// Who a worker is. Plain values: copy them, compare them, on any thread.

#include <chrono>
#include <cstdint>
#include <string>

namespace torchrpc {

/// A span of time, as time-outs are given: `std::chrono::seconds(5)` converts to it.
using Duration = std::chrono::steady_clock::duration;

/// A worker's rank in its group: 0 to world size - 1.
using WorkerId = int32_t;
/// No worker's rank.
constexpr WorkerId kNoWorker = -1;

/// A worker of the group.
struct WorkerInfo {
  std::string name;         ///< the name it was started with, one of its own in the group
  WorkerId id = kNoWorker;  ///< its rank

  friend bool operator==(const WorkerInfo&, const WorkerInfo&) = default;
};

/// "WorkerInfo(id=0, name=worker0)": the text that errors and logs have.
std::string toString(const WorkerInfo& worker);

}  // namespace torchrpc
