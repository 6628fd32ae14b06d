#pragma once

// Counts the activities of a node (calls that it makes, requests that it serves), so that a graceful shutdown can wait
// until none is under way.

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
  /// Adds a holder to an activity that has begun. The activity ends when each holder has called end().
  void hold() { running_.fetch_add(1, std::memory_order_acq_rel); }
  void end() {
    // Sequentially consistent, as in waitIdle(): either this thread sees that another one waits, or that one sees that
    // nothing is under way.
    if (running_.fetch_sub(1) == 1 && waiting_ > 0) {
      MutexLock lock(mutex_);
      idle_.notify_all();
    }
  }
  /// Waits until no activity is under way. Returns false after `timeout`.
  bool waitIdle(Duration timeout) {
    const auto deadline = deadlineAfter(timeout);
    MutexLock lock(mutex_);
    ++waiting_;
    const bool is_idle = waitInterruptibly(idle_, lock, deadline, [this] { return running_ == 0; });
    --waiting_;
    return is_idle;
  }
  int64_t running() const { return running_.load(std::memory_order_acquire); }
  /// The number of activities that have begun.
  int64_t total() const { return total_.load(std::memory_order_acquire); }

 private:
  std::atomic<int64_t> running_{0};
  std::atomic<int64_t> total_{0};
  std::atomic<int> waiting_{0};  ///< the threads in waitIdle()
  Mutex mutex_;
  CondVar idle_;
};

/// An activity, under way from the token's construction until its last copy is destroyed. The Activity must outlive all
/// copies.
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
