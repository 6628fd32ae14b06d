#pragma once

// A queue of which one task at a time takes the items: whoever adds an item to a queue that nobody drains starts the
// draining. So items are handled in their order, by a task that no thread waits for.
// Threads: any.

#include <algorithm>
#include <cstddef>
#include <deque>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"

namespace torchrpc {

template <typename T>
class DrainQueue {
 public:
  /// Returns whether the caller has to start the draining, which calls take() until that returns nothing.
  [[nodiscard]] bool add(T item) {
    MutexLock lock(mutex_);
    items_.push_back(std::move(item));
    return !std::exchange(is_draining_, true);
  }
  [[nodiscard]] bool add(std::vector<T> items) {
    if (items.empty()) return false;
    MutexLock lock(mutex_);
    std::ranges::move(items, std::back_inserter(items_));
    return !std::exchange(is_draining_, true);
  }

  /// Takes the first `most` items. If there are none, the draining has ended.
  std::vector<T> take(size_t most = std::numeric_limits<size_t>::max()) {
    MutexLock lock(mutex_);
    const auto end = items_.begin() + static_cast<std::ptrdiff_t>(std::min(items_.size(), most));
    std::vector<T> taken(std::make_move_iterator(items_.begin()), std::make_move_iterator(end));
    items_.erase(items_.begin(), end);
    if (taken.empty()) is_draining_ = false;
    return taken;
  }

  /// Takes all items. A draining that has begun continues, and will find none.
  std::vector<T> clear() {
    MutexLock lock(mutex_);
    std::vector<T> taken(std::make_move_iterator(items_.begin()), std::make_move_iterator(items_.end()));
    items_.clear();
    return taken;
  }

 private:
  Mutex mutex_;
  std::deque<T> items_ TORCHRPC_GUARDED_BY(mutex_);
  bool is_draining_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

}  // namespace torchrpc
