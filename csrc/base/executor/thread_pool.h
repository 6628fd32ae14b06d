#pragma once

// The threads that run handlers, user code and callbacks of futures. Threads start when there is work for them, up to
// `size`. While a thread is blocked (BlockingScope) another one takes its place, so that nested blocking calls cannot
// use up the pool. When blocked threads go on, surplus threads end: `size` idle ones stay.

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

  explicit ThreadPool(Options options);
  /// close().
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  using Executor::post;
  bool post(std::function<void()> task, TaskSource source) override;
  void postFromTask(std::function<void()> task) override;
  void close() { close(kNoLimit); }
  /// Waits for the threads to end.
  bool close(Duration timeout) override;
  void discardQueued() override;
  Stats stats() const override;

  /// Runs a task and logs what it throws, as the pool does.
  static void runLogged(const std::function<void()>& task);

  /// Whether the calling thread belongs to a pool.
  static bool onThread();
  /// Whether it belongs to this one.
  bool isOnOwnThread() const override;

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
