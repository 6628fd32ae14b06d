#pragma once

// How much is under way on a node (calls made, requests served), so that a graceful shutdown can wait for none.

#include <atomic>
#include <utility>

#include "base/sync/interrupt.h"
#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

class Activity {
 public:
  void begin() {
    running_.fetch_add(1, std::memory_order_acq_rel);
    total_.fetch_add(1, std::memory_order_acq_rel);
  }
  /// What has begun is held once more.
  void hold() { running_.fetch_add(1, std::memory_order_acq_rel); }
  void end() {
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      MutexLock lock(mutex_);
      idle_.notify_all();
    }
  }
  /// False if something still ran after `timeout` (0: waits as long as it takes).
  bool waitIdle(Duration timeout) {
    const auto deadline = timeout == Duration::zero() ? kNever : deadlineAfter(timeout);
    MutexLock lock(mutex_);
    return waitInterruptibly(idle_, lock, deadline, [this] { return running_.load(std::memory_order_acquire) == 0; });
  }
  int64_t running() const { return running_.load(std::memory_order_acquire); }
  /// Begun since the start.
  int64_t total() const { return total_.load(std::memory_order_acquire); }

 private:
  std::atomic<int64_t> running_{0};
  std::atomic<int64_t> total_{0};
  Mutex mutex_;
  CondVar idle_;
};

/// Something under way: begins when made, ends when the last copy is gone, before the Activity is.
class ActivityToken {
 public:
  ActivityToken() = default;
  explicit ActivityToken(Activity& of) : of_(&of) { of.begin(); }
  ActivityToken(const ActivityToken& other) : of_(other.of_) {
    if (of_) of_->hold();
  }
  ActivityToken(ActivityToken&& other) noexcept : of_(std::exchange(other.of_, nullptr)) {}
  ActivityToken& operator=(ActivityToken other) noexcept {
    std::swap(of_, other.of_);
    return *this;
  }
  ~ActivityToken() {
    if (of_) of_->end();
  }

 private:
  Activity* of_ = nullptr;
};

}  // namespace torchrpc
