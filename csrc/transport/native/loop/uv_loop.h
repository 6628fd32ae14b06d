#pragma once

// libuv's loop with what the transport needs of it: descriptors that become ready, timers, and a wake-up that any
// thread can send. uv_loop.cpp is the only file that includes uv.h.
// Threads: the loop thread; wake() from any.

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

  /// A watched descriptor or a timer. Ends when it is destroyed: on the loop thread, perhaps in its own callback.
  class Watch {
   public:
    Watch() = default;
    Watch(Watch&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Watch& operator=(Watch&& other) noexcept {
      std::swap(handle_, other.handle_);
      return *this;
    }
    ~Watch();
    /// Sets the events that call the callback; with neither, the watch is paused. Only for descriptors.
    void setInterest(bool readable, bool writable);
    explicit operator bool() const { return handle_ != nullptr; }

   private:
    friend class UvLoop;
    explicit Watch(Handle* handle) : handle_(handle) {}
    Handle* handle_ = nullptr;
  };

  /// runOnce() calls `on_wake` after a wake(). Throws Error(kRendezvous) if the system provides no event loop.
  explicit UvLoop(std::function<void()> on_wake);
  /// close().
  ~UvLoop();
  UvLoop(const UvLoop&) = delete;
  UvLoop& operator=(const UvLoop&) = delete;

  /// Paused until setInterest(). Throws Error(kWorkerLost) if the descriptor cannot be watched.
  Watch watch(int fd, Callback callback);
  /// Calls `callback` once.
  Watch after(Duration delay, std::function<void()> callback);

  /// Runs the callbacks that are due. `may_block`: waits until there is one.
  void runOnce(bool may_block);

  /// Lets a blocked runOnce() return. Not during close() or after it.
  void wake();

  /// All watches must have been destroyed. Idempotent.
  void close();

 private:
  const std::function<void()> on_wake_;
  std::unique_ptr<State> state_;  ///< nullptr once closed
};

}  // namespace torchrpc::native
