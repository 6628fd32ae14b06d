#pragma once

// Pauses UCX's own thread. All workers of a process share this thread; it accepts their connections.

#include <future>

#include "transport/ucx/libucp.h"

namespace torchrpc::ucx {

/// Pauses UCX's own thread while this object exists. Must not be used on that thread.
class AsyncThreadPause {
 public:
  /// Blocks until UCX's thread has finished its current work and is paused. If UCX cannot add the timer for that, the
  /// thread is not paused.
  explicit AsyncThreadPause(const Libucp& ucp);
  ~AsyncThreadPause();
  AsyncThreadPause(const AsyncThreadPause&) = delete;
  AsyncThreadPause& operator=(const AsyncThreadPause&) = delete;

 private:
  static constexpr int kNone = -1;

  static void onTimer(int timer, ucs_event_set_types_t, void* self);

  const Libucp& ucp_;
  int timer_ = kNone;
  bool has_waited_ = false;  ///< on UCX's thread only
  std::promise<void> begun_, ended_;
};

}  // namespace torchrpc::ucx
