#pragma once

// How the kernel schedules a thread.

#include <sched.h>

namespace torchrpc {

class Scheduling {
 public:
  /// That of the calling thread.
  Scheduling();
  /// Makes it the calling thread's.
  void apply() const;
  /// The same, but whenever the thread is woken it takes no core from one that runs; an idle core it has at once.
  /// (SCHED_BATCH. Threads that already are of another class than SCHED_OTHER stay as they are.)
  void applyBatchPolicy() const;

 private:
  int policy_ = SCHED_OTHER;
  sched_param parameters_{};
};

}  // namespace torchrpc
