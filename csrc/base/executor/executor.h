#pragma once

// Runs posted tasks: the interface by which a node runs its handlers and user code. A ThreadPool implements it; a
// simulation replaces it and runs all nodes in one thread at a time (testing/simulation.h).

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/timer.h"

namespace torchrpc {

/// For whom a task runs: the id of a worker. Tasks of one source do not hold up those of others (fair_queue.h).
using TaskSource = int32_t;
/// Of the node's own tasks.
constexpr TaskSource kOwnTasks = -1;

class Executor {
 public:
  struct Stats {
    size_t threads = 0;  ///< that have started and not ended
    size_t idle = 0;
    size_t blocked = 0;  ///< inside a ThreadPool::BlockingScope
    size_t queued = 0;   ///< tasks that have not started
    /// Threads that tasks wait for and that are not started, because there are as many as there may be or the system
    /// permits no more: see Note [Limit of threads] in thread_pool.cpp.
    size_t lacking = 0;
    TimePoint at_limit = TimePoint::min();  ///< when there were last as many threads as there may be; now, if there are
  };

  virtual ~Executor() = default;

  /// Runs `task`; tasks of one source start in the order posted. What a task throws is logged. After close() it returns
  /// false and destroys the task unrun. Thread-safe.
  virtual bool post(std::function<void()> task, TaskSource source) = 0;
  bool post(std::function<void()> task) { return post(std::move(task), kOwnTasks); }
  /// The same for a task that is posted by a task of this executor: it runs even if the executor is closing.
  virtual void postFromTask(std::function<void()> task) = 0;

  /// Accepts no more tasks, runs the queued ones and waits for those that run; false if some still run after `timeout`.
  /// The executor must not be destroyed before a later call has returned true. Must not be called from one of its
  /// tasks. Idempotent.
  virtual bool close(Duration timeout) = 0;
  /// Destroys the queued tasks unrun.
  virtual void discardQueued() = 0;

  /// Whether the calling thread runs a task of this executor.
  virtual bool isOnOwnThread() const = 0;
  virtual Stats stats() const = 0;
};

}  // namespace torchrpc
