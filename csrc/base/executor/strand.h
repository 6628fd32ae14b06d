#pragma once

// Tasks of which only one can run at a time, but for those that block: they need something that one thread has at any
// moment, as Python's GIL. One thread of the pool takes it and runs task after task; while there are more, a second one
// stands by, waiting to take it, and does so as soon as a task lets it go. So a queue of short tasks costs one
// hand-over, and a task that blocks holds up nobody.

#include <deque>
#include <functional>
#include <memory>

#include "base/executor/thread_pool.h"
#include "base/sync/mutex.h"

namespace torchrpc {

class Strand {
 public:
  /// Takes what the tasks need, waiting for it; the thread has it while the result lives.
  using Enter = std::function<std::shared_ptr<void>()>;

  /// `pool` must outlive it.
  Strand(ThreadPool& pool, Enter enter) : pool_(pool), enter_(std::move(enter)) {}

  /// As ThreadPool::post. Tasks start in the order posted.
  bool post(std::function<void()> task);

 private:
  /// On a thread of the pool, until there is nothing to do.
  void run();
  /// Runs the first task, if there is one.
  bool runOne();

  ThreadPool& pool_;
  const Enter enter_;
  Mutex mutex_;
  // guarded by mutex_:
  struct Task {
    uint64_t number;
    std::function<void()> run;
  };
  std::deque<Task> tasks_;
  uint64_t next_number_ = 0;
  bool coming_ = false;  ///< a thread has been called for and has not entered yet
};

}  // namespace torchrpc
