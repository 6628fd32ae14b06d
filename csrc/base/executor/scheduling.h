#pragma once

// The scheduling policy of a thread (sched(7)).

#include <sched.h>

namespace torchrpc {

class Scheduling {
 public:
  /// Reads the policy of the calling thread.
  Scheduling();
  /// Applies the policy to the calling thread.
  void apply() const;
  /// Applies the policy with SCHED_BATCH in place of SCHED_OTHER (other policies are unchanged): when the thread wakes,
  /// it does not preempt a running thread. It still runs at once if a core is idle.
  void applyBatchPolicy() const;

 private:
  int policy_ = SCHED_OTHER;
  sched_param parameters_{};
};

}  // namespace torchrpc
