#pragma once

// A queue of tasks of several sources. A short queue is first in, first out. Once kMostInOrder tasks wait, each further
// task waits in the lane of its source, and the lanes are served round-robin. So a source that posts thousands of tasks
// delays its own tasks, and those of other sources only by a few. Tasks of one source always leave in the order in
// which they were pushed. A short queue allocates no memory. Not thread-safe: the owner of a queue guards it with a
// mutex.

#include <algorithm>
#include <array>
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

  bool empty() const { return in_order_ == 0; }
  size_t size() const { return in_order_ + in_lanes_; }

  void push(Task task, TaskSource source) {
    if (in_lanes_ == 0 && in_order_ < kMostInOrder) {
      at(in_order_++) = std::move(task);
      return;
    }
    auto& lane = lanes_[source];
    if (lane.empty()) turns_.push_back(source);
    lane.push_back(std::move(task));
    ++in_lanes_;
  }

  /// Removes the first task and returns it. The queue must not be empty.
  Task pop() {
    auto task = std::exchange(at(0), Task());
    first_ = (first_ + 1) % kMostInOrder;
    --in_order_;
    if (in_lanes_ > 0) takeFromLane();
    return task;
  }

  /// Removes the task for which `is_wanted(task)` is true and moves it to `out`. Returns false if there is none.
  /// Searches all tasks.
  template <typename Predicate>
  bool extract(const Predicate& is_wanted, Task& out) {
    for (size_t i = 0; i < in_order_; ++i) {
      if (!is_wanted(at(i))) continue;
      out = std::exchange(at(i), Task());
      for (--in_order_; i < in_order_; ++i) at(i) = std::exchange(at(i + 1), Task());
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
  /// The task that leaves as number `index`, from 0, or a free place behind those.
  Task& at(size_t index) { return ring_[(first_ + index) % kMostInOrder]; }
  void takeFromLane() {
    const auto source = turns_.front();
    turns_.pop_front();
    const auto lane = lanes_.find(source);
    at(in_order_++) = std::move(lane->second.front());
    lane->second.pop_front();
    --in_lanes_;
    if (lane->second.empty()) {
      lanes_.erase(lane);
    } else {
      turns_.push_back(source);
    }
  }

  std::array<Task, kMostInOrder> ring_{};
  size_t first_ = 0;     ///< where the first task is in the ring
  size_t in_order_ = 0;  ///< tasks in the ring, which leave first; more than 0 while a task is in a lane
  std::unordered_map<TaskSource, std::deque<Task>> lanes_;  ///< none is empty
  std::deque<TaskSource> turns_;                            ///< the sources that have a lane, the next one first
  size_t in_lanes_ = 0;
};

}  // namespace torchrpc
