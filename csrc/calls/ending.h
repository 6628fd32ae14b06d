#pragma once

// Bounds how long the end of a node may wait: for the answers to the calls that it serves, and then for its peers to
// read them. Each wait can be made in pieces, and by several threads. See Note [The end of a node] in agent.cpp.
// Threads: the waits: any but the transport's loop; notify(): any.

#include <atomic>
#include <cstdint>
#include <functional>

#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

/// The time that functions that serve other workers have to answer when their worker ends.
constexpr Duration kServedCallsGrace = std::chrono::seconds(5);

class Ending {
 public:
  /// Begins the end of the node. The waits take no longer than `limit`, and the wait for answers no longer than
  /// `grace`. A later call can only shorten `limit`.
  void begin(Duration limit, Duration grace = kServedCallsGrace);
  bool hasBegun() const { return has_begun_.load(); }

  /// Waits until `is_answered()` returns true, for the grace after begin() at most. Returns false if the deadline comes
  /// first.
  bool awaitAnswers(const std::function<bool()>& is_answered, TimePoint deadline);
  /// Waits until `is_read()` returns true. Gives up when the value of `progress()` has not changed for some time.
  /// Returns false if the deadline comes first.
  bool awaitReaders(
      const std::function<bool()>& is_read, const std::function<uint64_t()>& progress, TimePoint deadline);
  /// Makes the waits check their conditions again. Costs one load before begin().
  void notify();

 private:
  enum class Wait { kAnswers, kReaders };
  /// Waits until `done()` returns true, until limitOf() that wait, or until the deadline. Returns false only for the
  /// deadline.
  bool wait(Wait what, const std::function<bool()>& done, TimePoint deadline);
  TimePoint limitOf(Wait what) const TORCHRPC_REQUIRES(mutex_);

  std::atomic<bool> has_begun_{false};
  // Guarded by mutex_:
  Mutex mutex_;
  CondVar changed_;
  uint64_t changes_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  TimePoint answers_limit_ TORCHRPC_GUARDED_BY(mutex_) = kNever;
  TimePoint ends_ TORCHRPC_GUARDED_BY(mutex_) = kNever;
  TimePoint readers_limit_ TORCHRPC_GUARDED_BY(mutex_) = kNever;
  TimePoint progress_at_ TORCHRPC_GUARDED_BY(mutex_) = kNever;  ///< when a change of progress_ was last seen
  uint64_t progress_ TORCHRPC_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchrpc
