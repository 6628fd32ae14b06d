#pragma once

// Collects the results of several requests that run at the same time. Thread-safe.

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "base/result.h"
#include "base/sync/mutex.h"

namespace torchrpc {

template <typename T>
class ResultCollector {
 public:
  using Results = std::vector<Result<T>>;
  using Done = std::function<void(Results)>;

  /// The last set() calls `done` with all results, in the order of their indices. `count` must not be 0.
  ResultCollector(size_t count, Done done) : done_(std::move(done)), outstanding_(count), results_(count) {}

  /// Sets result `i`. Must be called once for each index.
  void set(size_t i, Result<T> result) {
    Results all;
    {
      MutexLock lock(mutex_);
      results_[i] = std::move(result);
      if (--outstanding_ > 0) return;
      for (auto& each : results_) all.push_back(*std::move(each));
    }
    done_(std::move(all));
  }

 private:
  const Done done_;
  Mutex mutex_;
  size_t outstanding_ TORCHRPC_GUARDED_BY(mutex_);
  std::vector<std::optional<Result<T>>> results_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
