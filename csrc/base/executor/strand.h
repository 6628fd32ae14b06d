#pragma once

// Tasks that share something which one thread can hold at a time, as Python's GIL. One thread of the pool enters (takes
// the GIL, say) and runs task after task. While more tasks wait, a second thread waits to enter; it does so as soon as
// the first one blocks and releases what they share. So a queue of short tasks costs one hand-over, and a task that
// blocks does not delay those behind it.

#include <cstdint>
#include <functional>
#include <memory>

#include "base/executor/executor.h"
#include "base/executor/fair_queue.h"
#include "base/sync/mutex.h"

namespace torchrpc {

class Strand {
 public:
  /// Takes what the tasks share, and blocks until it has it. The thread holds it while the result lives.
  using Enter = std::function<std::shared_ptr<void>()>;

  /// `pool` must outlive it. `enter` may be empty.
  Strand(Executor& pool, Enter enter) : pool_(pool), enter_(std::move(enter)) {}

  /// As Executor::post.
  bool post(std::function<void()> task, TaskSource source = kOwnTasks);

  /// Tasks that have not started, besides those for which the pool counts a task of its own.
  size_t queued() const;

 private:
  /// Enters and runs tasks until there are none. On a thread of the pool.
  void run();
  /// Runs the first task; false if there is none.
  bool runOne();

  struct Task {
    uint64_t number = 0;
    std::function<void()> run;
  };

  Executor& pool_;
  const Enter enter_;
  mutable Mutex mutex_;
  FairQueue<Task> tasks_ TORCHRPC_GUARDED_BY(mutex_);
  uint64_t next_number_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  bool thread_requested_ TORCHRPC_GUARDED_BY(mutex_) = false;  ///< from the pool, and has not entered yet
  bool run_queued_ TORCHRPC_GUARDED_BY(mutex_) = false;        ///< run() is in the pool's queue
};

}  // namespace torchrpc
