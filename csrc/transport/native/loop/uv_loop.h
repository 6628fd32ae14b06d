#pragma once

// Wraps the features of libuv's loop that the transport uses: watches of descriptors, timers, and a wake-up that any
// thread can send. uv_loop.cpp is the only file that includes uv.h.
// Threads: any thread calls wake(); only the loop thread calls the other functions.

#include <functional>
#include <memory>
#include <utility>

#include "base/timer.h"

namespace torchrpc::native {

class UvLoop {
  struct Handle;
  struct State;

 public:
  /// The argument of a watch's callback.
  struct Ready {
    bool readable = false;
    bool writable = false;
    bool failed = false;  ///< the last callback of this watch: read all that is left
  };
  using Callback = std::function<void(Ready)>;

  /// A watched descriptor or a timer. Its destruction ends the watch. To be destroyed on the loop thread; its own
  /// callback may do that.
  class Watch {
   public:
    Watch() = default;
    Watch(Watch&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Watch& operator=(Watch&& other) noexcept {
      std::swap(handle_, other.handle_);
      return *this;
    }
    ~Watch();
    /// Sets which events trigger the callback. If both are false, the watch is paused. Only for descriptors.
    void setInterest(bool readable, bool writable);
    explicit operator bool() const { return handle_ != nullptr; }

   private:
    friend class UvLoop;
    explicit Watch(Handle* handle) : handle_(handle) {}
    Handle* handle_ = nullptr;
  };

  /// `on_wake`: called by runOnce() after a wake(). Throws Error(kRendezvous) if the system provides no event loop.
  explicit UvLoop(std::function<void()> on_wake);
  /// close().
  ~UvLoop();
  UvLoop(const UvLoop&) = delete;
  UvLoop& operator=(const UvLoop&) = delete;

  /// Watches a descriptor, from Watch::setInterest() on. Throws Error(kWorkerLost) if the descriptor cannot be watched.
  Watch watch(int fd, Callback callback);
  /// Calls `callback` once after `delay`.
  Watch after(Duration delay, std::function<void()> callback);

  /// Runs the callbacks that are due. `may_block`: blocks until at least one is due.
  void runOnce(bool may_block);

  /// Makes a blocked runOnce() return. Must not be called during or after close().
  void wake();

  /// Closes the loop. All watches must have been destroyed before. Idempotent.
  void close();

 private:
  const std::function<void()> on_wake_;
  std::unique_ptr<State> state_;  ///< nullptr once closed
};

}  // namespace torchrpc::native
