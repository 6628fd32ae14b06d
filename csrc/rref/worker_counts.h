#pragma once

// How many of something each worker has, so that nobody has to look through all of them. Not thread-safe.

#include <cstddef>
#include <map>
#include <set>

#include "base/ids.h"

namespace torchrpc {

class WorkerCounts {
 public:
  void add(WorkerId worker) {
    ++counts_[worker];
    ++total_;
  }
  /// One that was added.
  void remove(WorkerId worker) {
    const auto it = counts_.find(worker);
    if (--it->second == 0) counts_.erase(it);
    --total_;
  }
  void clear() {
    counts_.clear();
    total_ = 0;
  }
  /// Adds the workers that have some, but for kNoWorker.
  void addTo(std::set<WorkerId>& workers) const {
    for (const auto& [worker, count] : counts_) {
      if (worker != kNoWorker) workers.insert(worker);
    }
  }
  size_t total() const { return total_; }

 private:
  std::map<WorkerId, size_t> counts_;  ///< none of them 0
  size_t total_ = 0;
};

}  // namespace torchrpc
