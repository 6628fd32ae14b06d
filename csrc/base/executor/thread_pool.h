#pragma once

// The threads that run handlers, user code and callbacks of futures. Threads start when tasks need them, up to `size`.
// While a thread is blocked (BlockingScope), another one replaces it, so that nested blocking calls do not use up the
// pool. When blocked threads continue, surplus threads end: at most `size` idle ones stay.

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "base/executor/executor.h"
#include "base/sync/futex_waiter.h"
#include "base/timer.h"

namespace torchrpc {

class ThreadPool final : public Executor {
 public:
  struct Options {
    size_t size = 16;        ///< threads that run tasks at the same time, without blocked ones; at least 1
    size_t max_size = 1024;  ///< threads in all: when it is reached, blocked threads are not replaced
    std::string name = "torchrpc";
    /// Optional. Called by an idle thread before it sleeps, by one thread at a time. Polls the source of tasks until
    /// `done()` is true or until further polling is not worth its cost. May post to the pool.
    std::function<void(const std::function<bool()>& done)> poll_before_park{};
    /// Optional. Called if `poll_before_park` has found no task. Parks the thread where tasks arrive, until `done()` is
    /// true (the pool then notifies `waiter`) or until the thread should rather sleep in the pool. May post to the
    /// pool.
    std::function<void(const std::function<bool()>& done, FutexWaiter& waiter)> park{};
  };

  explicit ThreadPool(Options options);
  /// Calls close().
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  using Executor::post;
  bool post(Task&& task, TaskSource source) override;
  void postFromTask(Task task) override;
  void close() { close(kNoLimit); }
  /// Accepts no more tasks, runs the queued ones, and waits until the threads have ended, or returns false after
  /// `timeout`. A task of this pool may pass only a time-out of 0, which does not wait: the threads end after their
  /// tasks.
  bool close(Duration timeout) override;
  void discardQueued() override;
  Stats stats() const override;
  size_t waitingTasks() const override;

  /// Runs a task and logs its exception, if it throws, as the pool does.
  static void runLogged(const Task& task);

  /// Whether the calling thread belongs to any pool.
  static bool onThread();
  /// Whether the calling thread belongs to this pool.
  bool isOnOwnThread() const override;

  /// While a BlockingScope exists on a thread of a pool, the thread counts as blocked. Scopes may be nested. On other
  /// threads they have no effect.
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
