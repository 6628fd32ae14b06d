#pragma once

// Keeps calls of other workers that arrive while this worker is not ready for them. Threads: any.

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"

namespace torchrpc {

// Note [First calls]
// All workers of a group are ready at about the same time, but some leave init_rpc (or the constructor of the C++ API's
// node) a little earlier than others. Their first calls often run functions that read what the program sets up right
// after init_rpc. So a worker keeps the calls of user functions that arrive until its init_rpc has returned and the
// program has had a few milliseconds since, or makes a call itself: then it counts as set up, and two workers whose
// start includes calls to each other do not wait for each other.
//
// The calls that the group's own work consists of (operators, the protocols of RRefs and autograd, gatherings, the
// announcement of members) are not kept, and neither are calls of a worker to itself. A kept call counts as served: its
// deadline, its quota and the activity of the node include it. When the node ends, its gate opens for good.
//
// The worker that leads a gathering keeps calls, too, for as long as it distributes the objects: the others have left
// the gathering by then.
class CallGate {
 public:
  using Task = std::function<void()>;

  /// A reason to keep calls, until it is released or destroyed.
  class Hold {
   public:
    explicit Hold(std::shared_ptr<CallGate> gate) : gate_(std::move(gate)) { gate_->close(); }
    ~Hold() { release(); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    bool isReleased() const { return is_released_.load(std::memory_order_relaxed); }
    /// Runs the kept tasks on this thread if no other Hold is left. Idempotent.
    void release() {
      if (!is_released_.exchange(true)) gate_->open();
    }

   private:
    const std::shared_ptr<CallGate> gate_;
    std::atomic<bool> is_released_{false};
  };

  bool isOpen() const { return is_open_.load(std::memory_order_acquire); }
  /// Keeps the task, which must be brief, until the gate opens. Returns false if it is open: then `task` is unchanged.
  bool keep(Task& task) {
    MutexLock lock(mutex_);
    if (isOpen()) return false;
    kept_.push_back(std::move(task));
    return true;
  }
  /// Opens the gate, whatever is held, and ignores each later Hold.
  void openForGood() {
    std::vector<Task> kept;
    {
      MutexLock lock(mutex_);
      is_over_ = true;
      is_open_ = true;
      kept.swap(kept_);
    }
    for (const auto& task : kept) task();
  }

 private:
  void close() {
    MutexLock lock(mutex_);
    ++holds_;
    is_open_ = is_over_;
  }
  void open() {
    std::vector<Task> kept;
    {
      MutexLock lock(mutex_);
      if (--holds_ > 0) return;
      is_open_ = true;
      kept.swap(kept_);
    }
    for (const auto& task : kept) task();
  }

  std::atomic<bool> is_open_{true};  ///< changed with mutex_
  Mutex mutex_;
  int holds_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  bool is_over_ TORCHRPC_GUARDED_BY(mutex_) = false;
  std::vector<Task> kept_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
