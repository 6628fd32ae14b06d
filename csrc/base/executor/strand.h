#pragma once

// Runs tasks that need a resource which one thread can hold at a time, such as Python's GIL. One thread of the pool
// enters, which means that it acquires the resource, and runs one task after another. While more tasks wait, a second
// thread waits to enter. It enters as soon as the first one blocks and releases the resource. So a queue of short tasks
// costs one hand-over, and a task that blocks does not delay the tasks behind it. Tasks of the strand that block could
// occupy all threads of the pool as long as more of them wait. So a thread that has found tasks of the pool waiting for
// a thread goes back to the pool after kTurn, and another thread continues later.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "base/executor/executor.h"
#include "base/executor/fair_queue.h"
#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

class Strand {
 public:
  /// Acquires the resource, calls `run()` and releases the resource.
  using Enter = std::function<void(const std::function<void()>& run)>;

  /// `pool` must outlive the strand. `enter` may be empty.
  Strand(Executor& pool, Enter enter) : pool_(pool), enter_(std::move(enter)) {}

  /// As Executor::post().
  bool post(Executor::Task&& task, TaskSource source = kOwnTasks);

  /// The number of tasks that have not started, less the one that the pool counts already, as the queued run().
  size_t queued() const;

 private:
  /// Enters, and runs tasks until none is left. Called on a thread of the pool.
  void run();
  /// Runs tasks until none is left, or until the thread has to go back to the pool.
  void runTasks();
  /// Runs the first task. Returns false if there is none, or if the thread has to go back to the pool. `has_entered`:
  /// the thread that was requested is this one. `turn_ends`: when it has to go back, as soon as this is known.
  bool runOne(bool has_entered, std::optional<TimePoint>& turn_ends);
  /// Whether the pool has other tasks than run() that wait for a thread.
  bool isPoolShort() const TORCHRPC_REQUIRES(mutex_) { return pool_.waitingTasks() > (run_queued_ ? 1U : 0U); }

  static constexpr auto kTurn = std::chrono::milliseconds(1);

  struct Task {
    uint64_t number = 0;
    Executor::Task run;
  };

  Executor& pool_;
  const Enter enter_;
  mutable Mutex mutex_;
  FairQueue<Task> tasks_ TORCHRPC_GUARDED_BY(mutex_);
  uint64_t next_number_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  bool thread_requested_ TORCHRPC_GUARDED_BY(mutex_) = false;  ///< and has not entered yet
  // Written with the mutex, or by run() before it enters.
  std::atomic<bool> run_queued_{false};  ///< run() is in the pool's queue
  std::atomic<bool> has_tasks_{false};
};

}  // namespace torchrpc
