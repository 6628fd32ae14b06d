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

  /// `wake` makes the loop thread return from its wait. The queue calls it while it holds a mutex, and never after
  /// closeIfDrained() has returned true, so that the loop may be destroyed then.
  explicit TaskQueue(std::function<void()> wake) : wake_(std::move(wake)) {}

  /// Returns false after the queue has been closed: the task is destroyed without being run.
  bool post(Task task) {
    MutexLock lock(mutex_);
    if (closed_) return false;
    tasks_.push_back(std::move(task));
    has_tasks_ = true;
    // Called with the mutex, so that it cannot follow closeIfDrained(): see the constructor.
    if (needs_wake_) wake_();
    return true;
  }

  /// Makes closeIfDrained() close the queue as soon as it is empty. Idempotent.
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

  /// Whether the loop thread has work to do: a task, or a stop().
  bool hasTasks() const { return has_tasks_; }

  /// Sets whether post() wakes the loop thread. Sequentially consistent with hasTasks(): if the loop thread sets the
  /// flag and then finds no task, every later post() wakes it.
  void setNeedsWake(bool needs_wake) { needs_wake_ = needs_wake; }

  /// Runs the tasks that have been posted so far. Destroys each task before it runs the next one.
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

  /// Closes the queue and returns true if stop() has been called and no task is left.
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
