#pragma once

// The kernel's scheduling policy of a thread.

#include <sched.h>

namespace torchrpc {

class Scheduling {
 public:
  /// The policy of the calling thread.
  Scheduling();
  /// Applies the policy to the calling thread.
  void apply() const;
  /// The same with SCHED_BATCH in place of SCHED_OTHER (other policies are applied unchanged): a thread that wakes does
  /// not preempt a running one. It runs at once where a core is idle.
  void applyBatchPolicy() const;

 private:
  int policy_ = SCHED_OTHER;
  sched_param parameters_{};
};

}  // namespace torchrpc
