#pragma once

// The event loop of a native transport: one thread that waits for sockets, timers and tasks, and a poll set of
// connections in shared memory. Threads that wait for messages poll these in its stead: see Note [Busy polling] and
// Note [Leader/Followers].
// Threads: post(), stop(), inLoop(), poll(), park() from any; the others on the loop thread or, where it says "with the
// loop lock", also on a thread that polls in its stead.

#include <functional>
#include <span>
#include <thread>
#include <vector>

#include "base/sync/futex_waiter.h"
#include "base/sync/mutex.h"
#include "base/timer.h"
#include "transport/native/loop/leader.h"
#include "transport/native/loop/loop_lock.h"
#include "transport/native/loop/poll_set.h"
#include "transport/native/loop/spin_backoff.h"
#include "transport/native/loop/task_queue.h"
#include "transport/native/loop/uv_loop.h"

namespace torchrpc::native {

class EventLoop {
 public:
  using Ready = UvLoop::Ready;
  using Callback = UvLoop::Callback;
  using Watch = UvLoop::Watch;

  /// `spin_budget`: how long a thread polls without receiving anything before it gives up; zero: never polls. Throws
  /// Error(kRendezvous) if the system provides no event loop.
  explicit EventLoop(Duration spin_budget);
  /// stop().
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  /// Runs the task on the loop thread, with the loop lock. False once the loop has stopped: the task is destroyed
  /// without being run.
  bool post(std::function<void()> task) { return tasks_.post(std::move(task)); }
  /// Runs all tasks, also those that they post, then ends the thread. By then all watches must have been destroyed. Not
  /// from the loop. Idempotent.
  void stop();
  bool inLoop() const;
  /// Polls the active connections on the calling thread until `done` or until the spin budget is used up, or until
  /// another thread needs the core. Not with the loop lock.
  void poll(const std::function<bool()>& done) TORCHRPC_EXCLUDES(loop_lock_);
  /// Parks the calling thread on the wait words of the active connections, and polls them when it is woken: see
  /// Transport::park. Returns early if another thread is the leader, or becomes it. Not with the loop lock.
  void park(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint deadline, bool preemptible)
      TORCHRPC_EXCLUDES(loop_lock_) TORCHRPC_ANNOTATE(no_thread_safety_analysis);

  /// Paused until Watch::setInterest(). Calls `callback` without the loop lock. Throws Error(kWorkerLost) if the
  /// descriptor cannot be watched.
  Watch watch(int fd, Callback callback) { return uv_.watch(fd, std::move(callback)); }
  /// Calls `callback` once, without the loop lock.
  Watch after(Duration delay, std::function<void()> callback) { return uv_.after(delay, std::move(callback)); }
  /// Takes the loop lock until the loop thread goes to sleep. Callbacks of watches call it before they touch what the
  /// lock guards; tasks have it already. Idempotent. Only on the loop thread.
  void lockLoop() TORCHRPC_ANNOTATE(assert_capability(loop_lock_)) TORCHRPC_ANNOTATE(no_thread_safety_analysis);
  /// For annotations.
  const LoopLock& lock() const TORCHRPC_ANNOTATE(lock_returned(loop_lock_)) { return loop_lock_; }

  // With the loop lock.
  /// The connection has been active: polls it for a while. It is armed before the loop thread blocks.
  void addToPollSet(Pollable& pollable) TORCHRPC_REQUIRES(loop_lock_);
  void removeFromPollSet(Pollable& pollable) TORCHRPC_REQUIRES(loop_lock_) { poll_set_.remove(pollable); }
  /// Memory for a callback or a Pollable, until it returns.
  std::span<char> scratch() TORCHRPC_REQUIRES(loop_lock_) { return scratch_; }

 private:
  // On the loop thread.
  void run();
  /// False if the lock is kept, because the pollables have to be armed again: see releaseLock().
  bool unlockLoop() TORCHRPC_REQUIRES(loop_lock_) TORCHRPC_ANNOTATE(no_thread_safety_analysis);
  /// Arms the pollables; polls them once if that fails. True if the loop thread may block.
  bool armOrPoll() TORCHRPC_REQUIRES(loop_lock_);
  /// Polls while a peer is about to have copied something large.
  void pollForWrites() TORCHRPC_REQUIRES(loop_lock_);

  // On a thread that polls in the loop thread's stead.
  /// Takes the loop lock as soon as it is free; false if that takes long, or if `done`.
  bool lockToPoll(const std::function<bool()>& done) TORCHRPC_ANNOTATE(try_acquire_capability(true, loop_lock_));
  /// Polls until `done`, or until nothing has been received for a while.
  void spin(const std::function<bool()>& done) TORCHRPC_REQUIRES(loop_lock_);
  /// Arms the pollables and releases the loop lock. Leaves messages that have come meanwhile to the loop thread.
  void armAndUnlock() TORCHRPC_ANNOTATE(release_capability(loop_lock_));

  bool arm() TORCHRPC_REQUIRES(loop_lock_) { return poll_set_.arm(leader_.exists()); }
  /// Releases the loop lock. False if the leader for which pollables are armed has left since: then the caller takes
  /// the lock again, if it is free, and arms them again.
  [[nodiscard]] bool releaseLock() TORCHRPC_ANNOTATE(release_capability(loop_lock_));

  // Constant after construction.
  const Duration spin_budget_;

  // On the loop thread, but for the wake-up.
  UvLoop uv_;
  bool has_loop_lock_ = false;

  // Own synchronization.
  TaskQueue tasks_;
  LoopLock loop_lock_;
  SpinBackoff backoff_;
  Leader leader_;

  // Guarded by loop_lock_.
  PollSet poll_set_ TORCHRPC_GUARDED_BY(loop_lock_);
  bool needs_arming_ TORCHRPC_GUARDED_BY(loop_lock_) = false;  ///< arm() before the loop thread blocks
  std::vector<char> scratch_ TORCHRPC_GUARDED_BY(loop_lock_);

  // Used by the constructor and stop() only.
  std::thread thread_;
};

}  // namespace torchrpc::native
