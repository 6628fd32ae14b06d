#pragma once

// What the server does, without a word about calls: so it can be tested alone.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <torchrpc/error.h>
#include <unordered_map>
#include <vector>

#include "search.h"

namespace search {

/// Items, and the search among them. Any thread.
class Index {
 public:
  int64_t insert(const Item& item) {
    if (item.id.empty() || item.embedding.empty())
      throw torchrpc::Error(torchrpc::ErrorCode::kInvalidArgument, "an item needs an id and an embedding");
    std::unique_lock lock(mutex_);
    if (!items_.empty() && item.embedding.size() != items_.begin()->second.size())
      throw torchrpc::Error(
          torchrpc::ErrorCode::kInvalidArgument, "item " + item.id + " has another dimension than the others");
    items_[item.id] = item.embedding;
    return static_cast<int64_t>(items_.size());
  }

  std::vector<Hit> find(const Query& query) const {
    if (query.count < 1)
      throw torchrpc::Error(torchrpc::ErrorCode::kInvalidArgument, "the count of a query must be positive");
    std::vector<Hit> hits;
    std::shared_lock lock(mutex_);
    hits.reserve(items_.size());
    for (const auto& [id, embedding] : items_) {
      if (embedding.size() != query.embedding.size())
        throw torchrpc::Error(torchrpc::ErrorCode::kInvalidArgument, "the query has another dimension than the items");
      double score = 0;
      for (size_t i = 0; i < embedding.size(); ++i) score += double{embedding[i]} * double{query.embedding[i]};
      hits.push_back({id, score});
    }
    lock.unlock();
    const auto count = std::min(hits.size(), static_cast<size_t>(query.count));
    const auto end = hits.begin() + static_cast<std::ptrdiff_t>(count);
    std::partial_sort(hits.begin(), end, hits.end(), [](const auto& a, const auto& b) { return a.score > b.score; });
    hits.erase(end, hits.end());
    return hits;
  }

  Health health() const {
    const std::chrono::duration<double> uptime = std::chrono::steady_clock::now() - started_;
    std::shared_lock lock(mutex_);
    return {static_cast<int64_t>(items_.size()), uptime.count()};
  }

 private:
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  mutable std::shared_mutex mutex_;
  std::unordered_map<std::string, std::vector<float>> items_;
};

}  // namespace search
