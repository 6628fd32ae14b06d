#pragma once

// The number of objects of each worker, for example of its forks. It saves a search through all objects. Not
// thread-safe.

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
  /// Removes an object that was added for this worker.
  void remove(WorkerId worker) {
    const auto it = counts_.find(worker);
    if (--it->second == 0) counts_.erase(it);
    --total_;
  }
  void clear() {
    counts_.clear();
    total_ = 0;
  }
  size_t of(WorkerId worker) const {
    const auto it = counts_.find(worker);
    return it == counts_.end() ? 0 : it->second;
  }
  /// Adds the workers that have objects to `workers`, except kNoWorker.
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
