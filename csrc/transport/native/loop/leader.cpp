#include "transport/native/loop/leader.h"

namespace torchrpc::native {

bool Leader::tryLead(FutexWaiter& waiter, bool preemptible) {
  MutexLock lock(mutex_);
  auto* replaced = waiter_.load();
  if (replaced && !preemptible_) return false;
  waiter_ = &waiter;
  preemptible_ = preemptible;
  // With the mutex, so that the waiter still exists: the replaced thread calls resign() before it destroys its waiter.
  if (replaced) replaced->notify();
  return true;
}

bool Leader::resign(const FutexWaiter& waiter) {
  MutexLock lock(mutex_);
  if (!is(waiter)) return false;
  waiter_ = nullptr;
  return true;
}

}  // namespace torchrpc::native
