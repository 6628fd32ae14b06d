#include "transport/native/loop/loop_lock.h"

#include <chrono>

namespace torchrpc::native {

void LoopLock::lockFromLoopThread() {
  loop_thread_waits_ = true;
  mutex_.lock();
  loop_thread_waits_ = false;
}

bool LoopLock::tryLockFor(Duration limit, const std::function<bool()>& done, SpinBackoff& backoff) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (loop_thread_waits_ || !mutex_.try_lock()) {
    if (done() || std::chrono::steady_clock::now() > deadline || !backoff.yield()) return false;
  }
  return true;
}

}  // namespace torchrpc::native
