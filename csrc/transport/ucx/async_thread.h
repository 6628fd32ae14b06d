#pragma once

// UCX's own thread, which all workers of a process share: it accepts their connections.

#include <future>

#include "transport/ucx/libucp.h"

namespace torchrpc::ucx {

/// As long as it lives, UCX's own thread does nothing. Not on that thread.
class AsyncThreadPause {
 public:
  /// Waits until the thread has finished what it is doing. If UCX has no memory for that, the thread goes on.
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
