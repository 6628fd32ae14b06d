#pragma once

// The pending tasks of a timer, without a clock. Two timers use it: ThreadTimer, whose thread sleeps until the next
// task is due, and ManualTimer, whose time a test advances. Thread-safe.

#include <algorithm>
#include <functional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

// Nearly all deadlines are cancelled long before they are due. So cancel() removes only the task. Its heap entry is
// removed when it reaches the top, or when entries without a task are the larger part of the heap.
class TimerSchedule {
 public:
  using Id = Timer::Id;

  struct Added {
    Id id = 0;              ///< 0 if the schedule is closed
    bool is_first = false;  ///< whether the task is due before all others
  };

  Added add(TimePoint when, std::function<void()> task) {
    MutexLock lock(mutex_);
    if (closed_) return {};
    const Id id = next_id_++;
    tasks_.emplace(id, std::move(task));
    heap_.emplace_back(when, id);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
    return {id, heap_.front().second == id};
  }

  bool cancel(Id id) {
    std::function<void()> dropped;  // destroyed after the lock
    MutexLock lock(mutex_);
    auto found = tasks_.find(id);
    if (found == tasks_.end()) return false;
    dropped = std::move(found->second);
    tasks_.erase(found);
    if (heap_.size() > 2 * tasks_.size() + 64) compact();
    return true;
  }

  /// Removes the first task if it is due by `until`, calls `at_time` with the time at which it was due, and runs it.
  /// Returns false if no task is due, or after close().
  template <typename AtTime>
  bool runNext(TimePoint until, AtTime at_time) {
    MutexLock lock(mutex_);
    dropCancelled();
    if (closed_ || heap_.empty() || heap_.front().first > until) return false;
    const auto [when, id] = popFirst();
    auto found = tasks_.find(id);
    auto task = std::move(found->second);
    tasks_.erase(found);
    runner_ = std::this_thread::get_id();
    lock.unlock();
    at_time(when);
    task();
    task = nullptr;
    lock.lock();
    runner_ = {};
    task_ended_.notify_all();
    return true;
  }

  /// Sleeps until the first task is due, or until wake() or close() is called. May return early. Returns false after
  /// close().
  bool waitUntilDue() {
    MutexLock lock(mutex_);
    dropCancelled();
    if (!closed_) {
      const TimePoint until = heap_.empty() ? kNever : heap_.front().first;
      if (until == kNever) {
        wake_.wait(lock);
      } else {
        wake_.wait_until(lock, until);
      }
    }
    return !closed_;
  }

  void wake() { wake_.notify_one(); }

  void close() {
    decltype(tasks_) dropped;
    {
      MutexLock lock(mutex_);
      closed_ = true;
      dropped.swap(tasks_);
      heap_.clear();
      wake_.notify_one();
      while (runner_ != std::thread::id() && runner_ != std::this_thread::get_id()) task_ended_.wait(lock);
    }
  }

  size_t size() const {
    MutexLock lock(mutex_);
    return tasks_.size();
  }

 private:
  using Entry = std::pair<TimePoint, Id>;  // ids increase, so tasks that are due together stay in order

  Entry popFirst() TORCHRPC_REQUIRES(mutex_) {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    const auto first = heap_.back();
    heap_.pop_back();
    return first;
  }
  void dropCancelled() TORCHRPC_REQUIRES(mutex_) {
    while (!heap_.empty() && !tasks_.contains(heap_.front().second)) popFirst();
  }
  void compact() TORCHRPC_REQUIRES(mutex_) {
    std::erase_if(heap_, [&](const Entry& entry) TORCHRPC_REQUIRES(mutex_) { return !tasks_.contains(entry.second); });
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

  mutable Mutex mutex_;
  CondVar wake_;
  CondVar task_ended_;
  std::unordered_map<Id, std::function<void()>> tasks_ TORCHRPC_GUARDED_BY(mutex_);
  std::vector<Entry> heap_ TORCHRPC_GUARDED_BY(mutex_);
  Id next_id_ TORCHRPC_GUARDED_BY(mutex_) = 1;
  std::thread::id runner_ TORCHRPC_GUARDED_BY(mutex_);  ///< the thread that runs a task
  bool closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

}  // namespace torchrpc
