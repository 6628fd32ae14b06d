#pragma once

// The interface by which a node runs its handlers and user code as tasks. ThreadPool implements it. So does the
// simulation, which runs all nodes in one thread at a time (testing/simulation.h).

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/timer.h"
#include "base/unique_function.h"

namespace torchrpc {

/// The id of the worker for which a task runs. The tasks of one source do not hold up those of others (fair_queue.h).
using TaskSource = int32_t;
/// The source of the node's own tasks.
constexpr TaskSource kOwnTasks = -1;

class Executor {
 public:
  using Task = UniqueFunction<void()>;

  struct Stats {
    size_t threads = 0;  ///< that have started and have not ended
    size_t idle = 0;
    size_t blocked = 0;  ///< inside a ThreadPool::BlockingScope
    size_t queued = 0;   ///< tasks that have not started
    /// Threads that queued tasks need and that cannot be started, because the largest number of threads is reached or
    /// the system permits no more: see Note [Limit of threads] in thread_pool.cpp.
    size_t lacking = 0;
    TimePoint at_limit = TimePoint::min();  ///< when the largest number was last reached; now, if it is
  };

  virtual ~Executor() = default;

  /// Queues `task`. Tasks of one source start in the order in which they were posted. Exceptions of tasks are logged.
  /// After close() it returns false and leaves `task` as it is. Thread-safe.
  virtual bool post(Task&& task, TaskSource source) = 0;
  bool post(Task&& task) { return post(std::move(task), kOwnTasks); }
  /// Queues a task. To be called from a task of this executor: the new task runs even if the executor is closing.
  virtual void postFromTask(Task task) = 0;

  /// Accepts no more tasks, runs the queued ones, and waits until all have ended. Returns false if some have not ended
  /// after `timeout`: then the executor must not be destroyed before a later call has returned true. Must not be called
  /// from one of its tasks. Idempotent.
  virtual bool close(Duration timeout) = 0;
  /// Destroys the queued tasks unrun.
  virtual void discardQueued() = 0;

  /// Whether the calling thread runs a task of this executor.
  virtual bool isOnOwnThread() const = 0;
  virtual Stats stats() const = 0;
  /// The number of queued tasks, if as many tasks run as may run at the same time; else 0. Takes no mutex.
  virtual size_t waitingTasks() const { return 0; }
};

}  // namespace torchrpc
