#include "calls/program_threads.h"

namespace torchrpc {

void ProgramThreads::onArrived(TimePoint arrived) {
  MutexLock lock(mutex_);
  unanswered_.insert(arrived);
}

void ProgramThreads::onAnswered(TimePoint arrived) {
  MutexLock lock(mutex_);
  if (const auto found = unanswered_.find(arrived); found != unanswered_.end()) unanswered_.erase(found);
}

void ProgramThreads::onCallEnded(int thread, TimePoint begun, size_t unanswered) {
  MutexLock lock(mutex_);
  const bool may_be_waited_for =
      unanswered > unanswered_.size() || (!unanswered_.empty() && *unanswered_.begin() <= begun);
  if (!may_be_waited_for) threads_.insert(thread);
}

bool ProgramThreads::contains(int thread) const {
  MutexLock lock(mutex_);
  return threads_.contains(thread);
}

}  // namespace torchrpc
