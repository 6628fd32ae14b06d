#pragma once

// Tasks that any thread posts for the loop thread.
// Threads: post(), stop(), wake(), hasTasks() from any; the others on the loop thread.

#include <atomic>
#include <functional>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"

namespace torchrpc::native {

class TaskQueue {
 public:
  using Task = std::function<void()>;

  /// `wake` makes the loop thread return from its wait. It is called with a mutex held, and not after closeIfDrained()
  /// has returned true: from then on its target may be destroyed.
  explicit TaskQueue(std::function<void()> wake) : wake_(std::move(wake)) {}

  /// False once the queue is closed: the task is destroyed without being run.
  bool post(Task task) {
    MutexLock lock(mutex_);
    if (closed_) return false;
    tasks_.push_back(std::move(task));
    has_tasks_ = true;
    // With the mutex: see the constructor.
    if (needs_wake_) wake_();
    return true;
  }

  /// From now on closeIfDrained() closes the queue. Idempotent.
  void stop() {
    MutexLock lock(mutex_);
    stopping_ = true;
    has_tasks_ = true;
    if (!closed_) wake_();
  }

  void wake() {
    MutexLock lock(mutex_);
    if (!closed_) wake_();
  }

  /// Whether the loop thread has work to do: a task, or the end.
  bool hasTasks() const { return has_tasks_; }

  /// true: from now on post() wakes the loop thread. Sequentially consistent with hasTasks(): if the loop thread sets
  /// the flag and then finds no task, it is woken for each task that is posted later.
  void setNeedsWake(bool needs_wake) { needs_wake_ = needs_wake; }

  /// Runs the tasks that have been posted up to now. Each is destroyed before the next one starts.
  void runPosted() {
    if (!has_tasks_) return;
    std::vector<Task> batch;
    {
      MutexLock lock(mutex_);
      batch.swap(tasks_);
      has_tasks_ = stopping_;
    }
    for (auto& task : batch) std::exchange(task, nullptr)();
  }

  /// After stop(), once no task is left: closes the queue and returns true.
  bool closeIfDrained() {
    MutexLock lock(mutex_);
    closed_ = stopping_ && tasks_.empty();
    return closed_;
  }

 private:
  // Constant after construction.
  const std::function<void()> wake_;

  // Own synchronization.
  std::atomic<bool> has_tasks_{false};
  std::atomic<bool> needs_wake_{false};

  // Guarded by mutex_.
  Mutex mutex_;
  std::vector<Task> tasks_ TORCHRPC_GUARDED_BY(mutex_);
  bool stopping_ TORCHRPC_GUARDED_BY(mutex_) = false;
  bool closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

}  // namespace torchrpc::native
