#pragma once

// Frees the memory of frames that a transport no longer needs. Memory of malloc, of torch or of the transport itself
// is freed at once. Any other memory may run foreign code when its last reference is dropped: the deleter of
// torch.from_numpy() acquires the GIL, and so does a storage with a Python object. The loop must not wait for a
// function that holds the GIL, so a separate thread frees such memory. It starts on first use. Thread-safe.

#include <c10/core/Storage.h>

#include <memory>
#include <utility>
#include <vector>

#include "base/executor/task_thread.h"
#include "base/sync/mutex.h"
#include "wire/message.h"

namespace torchrpc {

class Disposal {
 public:
  /// `own_deleters`: the deleters of the transport's own memory, besides those of newSegment().
  explicit Disposal(std::vector<c10::DeleterFnPtr> own_deleters = {}) : own_deleters_(std::move(own_deleters)) {}
  /// stop().
  ~Disposal() { stop(); }
  Disposal(const Disposal&) = delete;
  Disposal& operator=(const Disposal&) = delete;

  /// Drops the frame's references to memory. Never waits. Before stop(), runs no foreign code on the calling thread.
  void drop(Frame&& frame);
  /// Frees all pending memory and ends the thread. A later drop() frees all memory at once. Not on the loop.
  /// Idempotent.
  void stop();

 private:
  bool isForeign(const Segment& segment) const;
  void dropForeign(std::vector<Segment> segments);
  /// Leaves thread_ null if the system permits no more threads.
  void startThread() TORCHRPC_REQUIRES(mutex_);

  // Constant after construction.
  const std::vector<c10::DeleterFnPtr> own_deleters_;

  // Guarded by mutex_.
  Mutex mutex_;
  std::unique_ptr<TaskThread> thread_ TORCHRPC_GUARDED_BY(mutex_);  ///< from its start to the end of this object
  std::vector<Segment> kept_ TORCHRPC_GUARDED_BY(mutex_);  ///< foreign memory that waits until a thread can start
  bool stopped_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

}  // namespace torchrpc
