#pragma once

// The threads outside of a node's pool that run code of the program for the node: functions and continuations on
// executors of the program, inlined continuations, coroutines of Python. Such a thread may make calls while the node
// ends, and cannot end the node, because the end waits for the code that it runs.
// Threads: any.

#include <memory>
#include <optional>

#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

class LentThreads {
 public:
  LentThreads() = default;
  LentThreads(const LentThreads&) = delete;
  LentThreads& operator=(const LentThreads&) = delete;

  /// While this object lives, the calling thread counts as lent. Scopes nest, also those of several nodes.
  class Mark {
   public:
    explicit Mark(const LentThreads& threads);
    ~Mark();
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;

   private:
    friend class LentThreads;
    const LentThreads& threads_;
    const Mark* const outer_;
  };
  /// A Mark while code of the program runs: close() waits until it is destroyed. After close(), or with null, it is
  /// false and has no effect.
  class Use {
   public:
    explicit Use(std::shared_ptr<LentThreads> threads);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    explicit operator bool() const { return threads_ != nullptr; }

   private:
    const std::shared_ptr<LentThreads> threads_;
    std::optional<Mark> mark_;
  };

  /// Whether the calling thread is lent.
  bool isCurrent() const;
  /// Lets no more Use begin, and waits until all have ended. Returns false after `timeout`.
  bool close(Duration timeout);

 private:
  /// Returns false after close().
  bool begin();
  void end();

  // Guarded by mutex_:
  Mutex mutex_;
  CondVar ended_;
  bool closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
  size_t running_ TORCHRPC_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchrpc
