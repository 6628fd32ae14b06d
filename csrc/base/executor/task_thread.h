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
  /// `purpose`: as startThread's.
  explicit TaskThread(const char* purpose = "of the transport");
  /// stop().
  ~TaskThread();
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  /// False, and the task is destroyed unrun, once stop() has run the last task. Thread-safe.
  bool post(std::function<void()> task);

  /// Runs the queued tasks, and those that they post, then ends the thread. Not from a task. Idempotent.
  void stop();

  /// Whether this is the thread.
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
