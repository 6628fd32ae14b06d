#pragma once

// Frees the memory of frames that a transport no longer needs. Most of it is malloc's, torch's or the transport's own,
// and is freed at once. Any other memory may run foreign code when its last reference is dropped: the memory of
// torch.from_numpy() takes the GIL, and so does a storage that has a Python object. The loop must not wait for a
// function that holds the GIL, so such memory is handed to a thread, which starts when it is first needed.
// Thread-safe.

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
  /// `own_deleters`: those of the transport's own memory, besides the ones of newSegment().
  explicit Disposal(std::vector<c10::DeleterFnPtr> own_deleters = {}) : own_deleters_(std::move(own_deleters)) {}
  /// stop().
  ~Disposal() { stop(); }
  Disposal(const Disposal&) = delete;
  Disposal& operator=(const Disposal&) = delete;

  /// Drops the references of `frame`. Never waits, and runs no foreign code before stop().
  void drop(Frame frame);
  /// Drops what is left and ends the thread. Afterwards drop() frees all memory at once. Not on the loop. Idempotent.
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
  std::unique_ptr<TaskThread> thread_ TORCHRPC_GUARDED_BY(mutex_);  ///< once made, until the end of this object
  std::vector<Segment> kept_ TORCHRPC_GUARDED_BY(mutex_);           ///< for which no thread could be started
  bool stopped_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

}  // namespace torchrpc
