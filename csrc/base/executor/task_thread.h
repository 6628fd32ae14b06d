#pragma once

// A thread that runs posted tasks, in order.

#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "base/sync/mutex.h"

namespace torchrpc {

class TaskThread {
 public:
  /// `purpose`: as for startThread().
  explicit TaskThread(const char* purpose = "of the transport");
  /// Calls stop().
  ~TaskThread();
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  /// Queues a task. Once stop() has run the last task, returns false and destroys the task unrun. Thread-safe.
  bool post(std::function<void()> task);

  /// Runs the queued tasks, and the tasks that they post, and ends the thread. Must not be called from a task.
  /// Idempotent.
  void stop();

  /// Whether the calling thread is this thread.
  bool inLoop() const;

 private:
  void run();

  Mutex mutex_;
  CondVar wake_;
  std::deque<std::function<void()>> tasks_ TORCHRPC_GUARDED_BY(mutex_);
  bool stopping_ TORCHRPC_GUARDED_BY(mutex_) = false;
  bool stopped_ TORCHRPC_GUARDED_BY(mutex_) = false;

  // Used by the constructor and by stop() only:
  std::thread thread_;
};

}  // namespace torchrpc
