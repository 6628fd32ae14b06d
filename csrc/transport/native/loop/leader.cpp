#include "transport/native/loop/leader.h"

namespace torchrpc::native {

bool Leader::tryLead(FutexWaiter& waiter, bool preemptible) {
  MutexLock lock(mutex_);
  auto* replaced = waiter_.load();
  do {
    if (replaced && !preemptible_) return false;
  } while (!waiter_.compare_exchange_weak(replaced, &waiter));  // fails if the leader resigns meanwhile
  preemptible_ = preemptible;
  // With the mutex, so that the waiter still exists: the replaced thread calls resign() before it destroys its waiter.
  if (replaced) replaced->notify();
  return true;
}

bool Leader::resign(const FutexWaiter& waiter) {
  auto* leader = waiter_.load();
  if (leader == &waiter && waiter_.compare_exchange_strong(leader, nullptr)) return true;
  MutexLock lock(mutex_);  // waits until a thread that replaces this one has notified the waiter
  return false;
}

}  // namespace torchrpc::native
