#include "base/executor/strand.h"

#include "base/executor/thread_pool.h"

namespace torchrpc {

bool Strand::post(std::function<void()> task, TaskSource source) {
  uint64_t number = 0;
  {
    MutexLock lock(mutex_);
    number = next_number_++;
    tasks_.push({number, std::move(task)}, source);
    if (std::exchange(thread_requested_, true)) return true;
    run_queued_ = true;
  }
  if (pool_.post([this] { run(); })) return true;
  // The pool is closed. A thread that had entered before may have removed the task from the queue to run it.
  Task dropped;  // destroyed after the lock
  MutexLock lock(mutex_);
  thread_requested_ = run_queued_ = false;
  return !tasks_.extract([number](const Task& task) { return task.number == number; }, dropped);
}

size_t Strand::queued() const {
  MutexLock lock(mutex_);
  return tasks_.size() - (run_queued_ && !tasks_.empty() ? 1 : 0);
}

void Strand::run() {
  {
    MutexLock lock(mutex_);
    run_queued_ = false;
  }
  const auto entered = enter_ ? enter_() : nullptr;
  {
    MutexLock lock(mutex_);
    thread_requested_ = false;
  }
  std::optional<TimePoint> turn_ends;
  while (runOne(turn_ends)) {
  }
}

bool Strand::runOne(std::optional<TimePoint>& turn_ends) {
  Task task;
  bool is_over = false;
  bool needs_another = false;
  {
    MutexLock lock(mutex_);
    if (tasks_.empty()) return false;
    if (isPoolShort()) {
      const auto now = TimePoint::clock::now();
      if (!turn_ends) turn_ends = now + kTurn;
      is_over = now >= *turn_ends;
    }
    if (!is_over) task = tasks_.pop();
    needs_another = !tasks_.empty() && !std::exchange(thread_requested_, true);
    run_queued_ |= needs_another;
  }
  if (needs_another) pool_.postFromTask([this] { run(); });
  if (is_over) return false;
  ThreadPool::runLogged(task.run);
  return true;
}

}  // namespace torchrpc
