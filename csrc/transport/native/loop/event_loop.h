#pragma once

// The event loop of a native transport: the loop thread, which waits for sockets, timers and tasks, and a poll set of
// connections in shared memory. Threads that wait for messages poll these connections in place of the loop thread: see
// Note [Busy polling] and Note [Leader/Followers] in event_loop.cpp.
// Threads: any thread calls post(), stop(), inLoop(), poll() and park(). Only the loop thread calls the other
// functions, except those "with the loop lock", which a thread that polls in its place also calls.

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

  /// `spin_budget`: how long a thread polls without receiving anything before it gives up. If zero, threads never poll.
  /// Throws Error(kRendezvous) if the system provides no event loop.
  explicit EventLoop(Duration spin_budget);
  /// stop().
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  /// Runs the task on the loop thread, with the loop lock. After the loop has stopped, returns false and destroys the
  /// task without running it.
  bool post(std::function<void()> task) { return tasks_.post(std::move(task)); }
  /// Runs all tasks, including those that tasks post, then ends the loop thread. All watches must have been destroyed
  /// by then. Must not be called on the loop. Idempotent.
  void stop();
  bool inLoop() const;
  /// Polls the active connections on the calling thread until `done()` is true, the spin budget is used up, or another
  /// thread needs the core. The caller must not hold the loop lock.
  void poll(const std::function<bool()>& done) TORCHRPC_EXCLUDES(loop_lock_);
  /// Parks the calling thread on the wait words of the active connections, and polls the connections when it is woken:
  /// see Transport::park(). Returns early if another thread is the leader, or becomes the leader. The caller must not
  /// hold the loop lock.
  void park(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint deadline, bool preemptible)
      TORCHRPC_EXCLUDES(loop_lock_) TORCHRPC_ANNOTATE(no_thread_safety_analysis);

  /// Watches a descriptor, from Watch::setInterest() on. Calls `callback` without the loop lock. Throws
  /// Error(kWorkerLost) if the descriptor cannot be watched.
  Watch watch(int fd, Callback callback) { return uv_.watch(fd, std::move(callback)); }
  /// Calls `callback` once after `delay`, without the loop lock.
  Watch after(Duration delay, std::function<void()> callback) { return uv_.after(delay, std::move(callback)); }
  /// Acquires the loop lock until the loop thread goes to sleep. Callbacks of watches call this before they access the
  /// state that the lock guards; tasks already hold the lock. Idempotent. Only on the loop thread.
  void lockLoop() TORCHRPC_ANNOTATE(assert_capability(loop_lock_)) TORCHRPC_ANNOTATE(no_thread_safety_analysis);
  /// The lock, for thread-safety annotations.
  const LoopLock& lock() const TORCHRPC_ANNOTATE(lock_returned(loop_lock_)) { return loop_lock_; }

  // With the loop lock.
  /// Adds an active connection to the poll set for some rounds. The connection is armed before the loop thread blocks.
  void addToPollSet(Pollable& pollable) TORCHRPC_REQUIRES(loop_lock_);
  void removeFromPollSet(Pollable& pollable) TORCHRPC_REQUIRES(loop_lock_) { poll_set_.remove(pollable); }
  /// Returns memory that a callback or a Pollable may use until it returns.
  std::span<char> scratch() TORCHRPC_REQUIRES(loop_lock_) { return scratch_; }

 private:
  // On the loop thread.
  void run();
  /// Releases the loop lock. Returns false, with the lock, if the pollables have to be armed again: see releaseLock().
  bool unlockLoop() TORCHRPC_REQUIRES(loop_lock_) TORCHRPC_ANNOTATE(no_thread_safety_analysis);
  /// Arms the pollables. If that fails, polls them once and returns false; then the loop thread must not block.
  bool armOrPoll() TORCHRPC_REQUIRES(loop_lock_);
  /// Polls while a peer is about to finish a large copy (PollHint::kWriteInProgress).
  void pollForWrites() TORCHRPC_REQUIRES(loop_lock_);

  // On a thread that polls in place of the loop thread.
  /// Acquires the loop lock within the spin budget, without sleeping. Returns false as LoopLock::tryLockFor() does.
  bool lockToPoll(const std::function<bool()>& done) TORCHRPC_ANNOTATE(try_acquire_capability(true, loop_lock_));
  /// Polls until `done()` is true, or for a limited time: see Note [Busy polling].
  void spin(const std::function<bool()>& done) TORCHRPC_REQUIRES(loop_lock_);
  /// Arms the pollables and releases the loop lock. If messages have arrived meanwhile, wakes the loop thread for them.
  void armAndUnlock() TORCHRPC_ANNOTATE(release_capability(loop_lock_));

  bool arm() TORCHRPC_REQUIRES(loop_lock_) { return poll_set_.arm(leader_.exists()); }
  /// Releases the loop lock. Returns false if pollables are armed for the leader and it has left: then the caller
  /// acquires the lock again, if it is free, and arms them again.
  [[nodiscard]] bool releaseLock() TORCHRPC_ANNOTATE(release_capability(loop_lock_));

  // Constant after construction.
  const Duration spin_budget_;

  // On the loop thread, except UvLoop::wake().
  UvLoop uv_;
  bool has_loop_lock_ = false;

  // Own synchronization.
  TaskQueue tasks_;
  LoopLock loop_lock_;
  SpinBackoff backoff_;
  Leader leader_;

  // Guarded by loop_lock_.
  PollSet poll_set_ TORCHRPC_GUARDED_BY(loop_lock_);
  bool needs_arming_ TORCHRPC_GUARDED_BY(loop_lock_) = false;  ///< the loop thread must call arm() before it blocks
  std::vector<char> scratch_ TORCHRPC_GUARDED_BY(loop_lock_);

  // Used by the constructor and stop() only.
  std::thread thread_;
};

}  // namespace torchrpc::native
