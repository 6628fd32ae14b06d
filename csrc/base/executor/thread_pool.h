#pragma once

// Where handlers, user code and future callbacks run. Threads start when there is work for them, up to `size`;
// a thread that blocks on another call (BlockingScope) is replaced while it does, so that nested blocking calls
// cannot use the pool up. Of the threads that this leaves over, `size` stay, idle.

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
    size_t size = 16;        ///< threads that run at once (those inside a BlockingScope not counted); at least 1
    size_t max_size = 1024;  ///< threads altogether: past it a BlockingScope brings no replacement
    std::string name = "torchrpc";
    /// What a thread, one at a time, does before it sleeps: look for what will bring a task, until `done` or until it
    /// is better to sleep. May post to the pool.
    std::function<void(const std::function<bool()>& done)> look{};
    /// After a look in vain, if given: sleep where tasks come from, until `done` (what makes it so rings the waiter) or
    /// until it is better to sleep in the pool. May post to it.
    std::function<void(const std::function<bool()>& done, FutexWaiter& waiter)> sleep{};
  };
  struct Stats {
    size_t threads = 0;  ///< started
    size_t idle = 0;
    size_t blocked = 0;  ///< inside a BlockingScope
    size_t queued = 0;   ///< tasks that no thread has taken
  };

  explicit ThreadPool(Options options);
  /// close().
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Runs `task` on some thread; tasks start in the order posted. A task that throws is logged, not fatal.
  /// False, and the task is destroyed unrun, after close(). Thread-safe.
  bool post(std::function<void()> task);
  /// The same, called by a task of this pool that needs another one beside it: taken even while the pool closes.
  void postFromTask(std::function<void()> task);

  /// Takes no more tasks, runs what is queued, waits for the threads. Must not be called from a pool thread.
  /// Idempotent.
  void close() { close(kForever); }
  /// The same, but false after so long with threads still there. The pool must not be destroyed before a later call
  /// has given true.
  bool close(Duration patience);
  /// Destroys the tasks that have not begun.
  void drop();

  Stats stats() const;

  /// Runs a task as a pool does.
  static void runLogged(const std::function<void()>& task);

  /// Whether this is a thread of some pool.
  static bool onThread();

  /// While one lives on a pool thread, that thread does not count as running. Nests; a no-op on other threads.
  class BlockingScope {
   public:
    BlockingScope();
    ~BlockingScope();
    BlockingScope(const BlockingScope&) = delete;
    BlockingScope& operator=(const BlockingScope&) = delete;
  };

 private:
  static constexpr Duration kForever = Duration::max();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace torchrpc
