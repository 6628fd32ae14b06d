#include "observe/latency_histogram.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace torchrpc {

uint64_t LatencyHistogram::total() const { return std::accumulate(counts_.begin(), counts_.end(), uint64_t{0}); }

uint64_t LatencyHistogram::quantile(double part) const {
  const auto all = total();
  if (all == 0) return 0;
  const auto rank = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(part * static_cast<double>(all))));
  uint64_t seen = 0;
  for (size_t bucket = 0; bucket < kBuckets; ++bucket) {
    seen += counts_.at(bucket);
    if (seen >= rank) return endOf(std::min(bucket, kBuckets - 2));
  }
  return endOf(kBuckets - 2);
}

}  // namespace torchrpc
