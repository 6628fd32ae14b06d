#pragma once

// The threads that run handlers, user code and callbacks of futures. Threads start when there is work for them, up to
// `size`. While a thread is blocked (BlockingScope) another one takes its place, so that nested blocking calls cannot
// use up the pool. When blocked threads go on, surplus threads end: `size` idle ones stay.

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "base/sync/futex_waiter.h"
#include "base/timer.h"

namespace torchrpc {

class ThreadPool {
 public:
  struct Options {
    size_t size = 16;        ///< threads that run at once, without blocked ones; at least 1
    size_t max_size = 1024;  ///< threads in all: beyond it a blocked thread is not replaced
    std::string name = "torchrpc";
    /// Called by a thread without a task before it sleeps, by one thread at a time: polls the source of tasks, until
    /// `done()` or until polling is not worth it any more. May post to the pool.
    std::function<void(const std::function<bool()>& done)> poll_before_park{};
    /// Called if `poll_before_park` has found nothing, if given: sleeps where tasks arrive, until `done()` (the pool
    /// notifies `waiter` when that becomes true) or until the thread should rather sleep in the pool. May post to it.
    std::function<void(const std::function<bool()>& done, FutexWaiter& waiter)> park{};
  };
  struct Stats {
    size_t threads = 0;  ///< that have started and not ended
    size_t idle = 0;
    size_t blocked = 0;  ///< inside a BlockingScope
    size_t queued = 0;   ///< tasks that have not started
    /// Threads that tasks wait for and that are not started, because the pool has Options::max_size threads or the
    /// system permits no more: see Note [Limit of threads].
    size_t lacking = 0;
    TimePoint at_limit = TimePoint::min();  ///< when the pool last had max_size threads; now, if it has
  };

  explicit ThreadPool(Options options);
  /// close().
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Runs `task` on a thread of the pool; tasks start in the order posted. What a task throws is logged. After close()
  /// it returns false and destroys the task unrun. Thread-safe.
  bool post(std::function<void()> task);
  /// The same for a task that is posted by a task of this pool: it runs even if the pool is closing.
  void postFromTask(std::function<void()> task);

  /// Accepts no more tasks, runs the queued ones, waits for the threads to end. Must not be called from a pool thread.
  /// Idempotent.
  void close() { close(kNoLimit); }
  /// The same, but false if threads still run after `timeout`. The pool must not be destroyed before a later call has
  /// returned true.
  bool close(Duration timeout);
  /// Destroys the queued tasks unrun.
  void discardQueued();

  Stats stats() const;

  /// Runs a task and logs what it throws, as the pool does.
  static void runLogged(const std::function<void()>& task);

  /// Whether the calling thread belongs to a pool.
  static bool onThread();
  /// Whether it belongs to this one.
  bool isOnOwnThread() const;

  /// While one lives on a pool thread, that thread counts as blocked. May be nested; does nothing on other threads.
  class BlockingScope {
   public:
    BlockingScope();
    ~BlockingScope();
    BlockingScope(const BlockingScope&) = delete;
    BlockingScope& operator=(const BlockingScope&) = delete;
  };

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace torchrpc
