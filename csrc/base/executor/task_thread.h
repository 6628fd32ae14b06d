#pragma once

// A thread that runs what is posted to it, in order.

#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "base/sync/mutex.h"

namespace torchrpc {

class TaskThread {
 public:
  TaskThread();
  /// stop().
  ~TaskThread();
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  /// False, and the task is destroyed unrun, once stop() has let go of the last task. Thread-safe.
  bool post(std::function<void()> task);

  /// Runs what is queued, and what that posts, then ends the thread. Not from the loop. Idempotent.
  void stop();

  bool inLoop() const;

 private:
  void run();

  // Guarded by mutex_.
  Mutex mutex_;
  CondVar wake_;
  std::deque<std::function<void()>> tasks_ TORCHRPC_GUARDED_BY(mutex_);
  bool stopping_ TORCHRPC_GUARDED_BY(mutex_) = false;
  bool stopped_ TORCHRPC_GUARDED_BY(mutex_) = false;

  // Touched by the constructor and by stop() only.
  std::thread thread_;
};

}  // namespace torchrpc
