#include "base/executor/strand.h"

#include "base/executor/thread_pool.h"

namespace torchrpc {

bool Strand::post(Executor::Task&& task, TaskSource source) {
  uint64_t number = 0;
  {
    MutexLock lock(mutex_);
    number = next_number_++;
    tasks_.push({number, std::move(task)}, source);
    has_tasks_ = true;
    if (std::exchange(thread_requested_, true)) return true;
    run_queued_ = true;
  }
  if (pool_.post([this] { run(); })) return true;
  // The pool is closed. A thread that had entered before may have removed the task from the queue to run it.
  Task dropped;
  MutexLock lock(mutex_);
  thread_requested_ = run_queued_ = false;
  const bool has_dropped = tasks_.extract([number](const Task& task) { return task.number == number; }, dropped);
  has_tasks_ = !tasks_.empty();
  if (has_dropped) task = std::move(dropped.run);
  return !has_dropped;
}

size_t Strand::queued() const {
  MutexLock lock(mutex_);
  return tasks_.size() - (run_queued_ && !tasks_.empty() ? 1 : 0);
}

void Strand::run() {
  run_queued_ = false;
  if (enter_) {
    enter_([this] { runTasks(); });
  } else {
    runTasks();
  }
}

void Strand::runTasks() {
  std::optional<TimePoint> turn_ends;
  bool has_entered = true;
  // A task that is posted after the last look has requested another thread.
  while (runOne(std::exchange(has_entered, false), turn_ends) && has_tasks_) {
  }
}

bool Strand::runOne(bool has_entered, std::optional<TimePoint>& turn_ends) {
  Task task;
  bool is_over = false;
  bool needs_another = false;
  {
    MutexLock lock(mutex_);
    if (has_entered) thread_requested_ = false;
    if (tasks_.empty()) return false;
    if (isPoolShort()) {
      const auto now = TimePoint::clock::now();
      if (!turn_ends) turn_ends = now + kTurn;
      is_over = now >= *turn_ends;
    }
    if (!is_over) task = tasks_.pop();
    has_tasks_ = !tasks_.empty();
    needs_another = has_tasks_ && !std::exchange(thread_requested_, true);
    if (needs_another) run_queued_ = true;
  }
  if (needs_another) pool_.postFromTask([this] { run(); });
  if (is_over) return false;
  ThreadPool::runLogged(task.run);
  return true;
}

}  // namespace torchrpc
