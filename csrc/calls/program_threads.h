#pragma once

// Finds out which threads of the program call for the program itself while its node ends, and not for a function that
// the node serves. See Note [The end of a node] in agent.cpp. Threads: any.

#include <set>

#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

class ProgramThreads {
 public:
  /// Records that a request has arrived, and that it has been answered, since the node began to refuse calls. Times of
  /// arrival need not differ.
  void onArrived(TimePoint arrived);
  void onAnswered(TimePoint arrived);
  /// Records that a call has ended that this thread (its id is the system's) began at that time. `unanswered`: the
  /// requests that the node has not answered, whenever they arrived. If all of them arrived while the call was under
  /// way, no function has waited for it, so the thread calls for the program.
  void onCallEnded(int thread, TimePoint begun, size_t unanswered);
  /// Whether calls of the thread are known to be the program's.
  bool contains(int thread) const;

 private:
  mutable Mutex mutex_;
  std::multiset<TimePoint> unanswered_ TORCHRPC_GUARDED_BY(mutex_);  ///< their times of arrival
  std::set<int> threads_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
