#include "base/executor/task_thread.h"

#include <utility>

#include "base/executor/start_thread.h"

namespace torchrpc {

namespace {
thread_local const TaskThread* current_loop = nullptr;
}  // namespace

TaskThread::TaskThread(const char* purpose) : thread_(startThread(purpose, [this] { run(); })) {}

TaskThread::~TaskThread() { stop(); }

bool TaskThread::inLoop() const { return current_loop == this; }

bool TaskThread::post(std::function<void()> task) {
  MutexLock lock(mutex_);
  if (stopped_) return false;
  tasks_.push_back(std::move(task));
  // The thread sleeps only while the queue is empty. It is notified under the lock, because stop() may return once the
  // lock is released, and `this` may be destroyed then.
  if (tasks_.size() == 1) wake_.notify_one();
  return true;
}

void TaskThread::stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void TaskThread::run() {
  current_loop = this;
  std::deque<std::function<void()>> batch;
  for (;;) {
    {
      MutexLock lock(mutex_);
      while (tasks_.empty() && !stopping_) wake_.wait(lock);
      if (tasks_.empty()) {
        stopped_ = true;
        return;
      }
      batch.swap(tasks_);
    }
    while (!batch.empty()) {
      auto task = std::move(batch.front());
      batch.pop_front();
      task();
    }
  }
}

}  // namespace torchrpc
