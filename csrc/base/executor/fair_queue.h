#pragma once

// A queue of tasks of several sources. A short queue is first in, first out. Once kMostInOrder tasks wait, each further
// task waits in the lane of its source, and the lanes are served round-robin. So a source that posts thousands of tasks
// delays its own tasks, and those of other sources only by a few. Tasks of one source always leave in the order in
// which they were pushed. Not thread-safe: the owner of a queue guards it with a mutex.

#include <algorithm>
#include <cstddef>
#include <deque>
#include <unordered_map>
#include <utility>

#include "base/executor/executor.h"

namespace torchrpc {

template <typename Task>
class FairQueue {
 public:
  /// The delay by so many tasks of a microsecond or two does not justify lanes.
  static constexpr size_t kMostInOrder = 32;

  bool empty() const { return in_order_.empty(); }
  size_t size() const { return in_order_.size() + in_lanes_; }

  void push(Task task, TaskSource source) {
    if (in_lanes_ == 0 && in_order_.size() < kMostInOrder) {
      in_order_.push_back(std::move(task));
      return;
    }
    auto& lane = lanes_[source];
    if (lane.empty()) turns_.push_back(source);
    lane.push_back(std::move(task));
    ++in_lanes_;
  }

  /// Removes the first task and returns it. The queue must not be empty.
  Task pop() {
    auto task = std::move(in_order_.front());
    in_order_.pop_front();
    if (in_lanes_ > 0) takeFromLane();
    return task;
  }

  /// Removes the task for which `is_wanted(task)` is true and moves it to `out`. Returns false if there is none.
  /// Searches all tasks.
  template <typename Predicate>
  bool extract(const Predicate& is_wanted, Task& out) {
    if (const auto it = std::ranges::find_if(in_order_, is_wanted); it != in_order_.end()) {
      out = std::move(*it);
      in_order_.erase(it);
      if (in_lanes_ > 0) takeFromLane();
      return true;
    }
    for (auto& [source, lane] : lanes_) {
      const auto it = std::ranges::find_if(lane, is_wanted);
      if (it == lane.end()) continue;
      out = std::move(*it);
      lane.erase(it);
      --in_lanes_;
      if (lane.empty()) {
        std::erase(turns_, source);
        lanes_.erase(source);
      }
      return true;
    }
    return false;
  }

 private:
  void takeFromLane() {
    const auto source = turns_.front();
    turns_.pop_front();
    const auto lane = lanes_.find(source);
    in_order_.push_back(std::move(lane->second.front()));
    lane->second.pop_front();
    --in_lanes_;
    if (lane->second.empty()) {
      lanes_.erase(lane);
    } else {
      turns_.push_back(source);
    }
  }

  std::deque<Task> in_order_;                               ///< leaves first; not empty while a task is in a lane
  std::unordered_map<TaskSource, std::deque<Task>> lanes_;  ///< none is empty
  std::deque<TaskSource> turns_;                            ///< the sources that have a lane, the next one first
  size_t in_lanes_ = 0;
};

}  // namespace torchrpc
