#include "transport/native/loop/uv_loop.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <unistd.h>
#include <uv.h>

#include "base/error.h"

namespace torchrpc::native {

struct UvLoop::State {
  uv_loop_t loop;
  uv_async_t wake;
};

struct UvLoop::Handle {
  union {
    uv_handle_t any;
    uv_poll_t poll;
    uv_timer_t timer;
  };
  Callback callback;

  static Handle& of(void* handle) { return *static_cast<Handle*>(static_cast<uv_handle_t*>(handle)->data); }
};

// ---- watches ----

UvLoop::Watch::~Watch() {
  if (handle_) uv_close(&handle_->any, [](uv_handle_t* handle) { delete &Handle::of(handle); });
}

void UvLoop::Watch::setInterest(bool readable, bool writable) {
  const int events = (readable ? UV_READABLE : 0) | (writable ? UV_WRITABLE : 0);
  if (events == 0) {
    uv_poll_stop(&handle_->poll);
    return;
  }
  uv_poll_start(&handle_->poll, events, [](uv_poll_t* poll, int status, int events) {
    const bool failed = status < 0;
    Handle::of(poll).callback({failed || (events & UV_READABLE), failed || (events & UV_WRITABLE), failed});
  });
}

UvLoop::Watch UvLoop::watch(int fd, Callback callback) {
  auto handle = std::make_unique<Handle>();
  handle->callback = std::move(callback);
  if (const int error = uv_poll_init(&state_->loop, &handle->poll, fd); error != 0) {
    throw Error(ErrorCode::kWorkerLost, std::string("a descriptor cannot be watched: ") + uv_strerror(error));
  }
  handle->any.data = handle.get();
  return Watch(handle.release());
}

UvLoop::Watch UvLoop::after(Duration delay, std::function<void()> callback) {
  auto handle = std::make_unique<Handle>();
  handle->callback = [callback = std::move(callback)](Ready) { callback(); };
  uv_timer_init(&state_->loop, &handle->timer);
  handle->any.data = handle.get();
  const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(delay).count();
  // libuv starts the timer at the time of its last read of the clock, which may be long ago.
  uv_update_time(&state_->loop);
  uv_timer_start(
      &handle->timer, [](uv_timer_t* timer) { Handle::of(timer).callback({}); },
      static_cast<uint64_t>(std::max<int64_t>(0, milliseconds)), 0);
  return Watch(handle.release());
}

// ---- the loop ----

namespace {

/// Throws Error(kRendezvous) if the process cannot open as many descriptors as a loop needs. libuv ends the process if
/// it cannot open those of its signal handling, which the first loop initializes.
void requireDescriptors() {
  constexpr int kNeeded = 6;
  std::array<int, kNeeded> opened{};
  int count = 0;
  while (count < kNeeded && (opened.at(count) = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0) ++count;
  const int error = errno;
  for (int i = 0; i < count; ++i) ::close(opened.at(i));
  if (count == kNeeded) return;
  throw Error(
      ErrorCode::kRendezvous,
      std::string("the transport's event loop cannot start: ") + std::strerror(error) +
          ". Close files, or raise the limit: ulimit -n");
}

}  // namespace

UvLoop::UvLoop(std::function<void()> on_wake) : on_wake_(std::move(on_wake)), state_(std::make_unique<State>()) {
  requireDescriptors();
  int error = uv_loop_init(&state_->loop);
  if (error == 0) {
    error = uv_async_init(
        &state_->loop, &state_->wake, [](uv_async_t* wake) { static_cast<UvLoop*>(wake->loop->data)->on_wake_(); });
    if (error != 0) uv_loop_close(&state_->loop);
  }
  if (error != 0) {
    throw Error(ErrorCode::kRendezvous, std::string("the transport's event loop cannot start: ") + uv_strerror(error));
  }
  state_->loop.data = this;
}

UvLoop::~UvLoop() { close(); }

void UvLoop::runOnce(bool may_block) { uv_run(&state_->loop, may_block ? UV_RUN_ONCE : UV_RUN_NOWAIT); }

void UvLoop::wake() { uv_async_send(&state_->wake); }

void UvLoop::close() {
  if (!state_) return;
  uv_close(reinterpret_cast<uv_handle_t*>(&state_->wake), nullptr);
  uv_run(&state_->loop, UV_RUN_DEFAULT);
  uv_loop_close(&state_->loop);
  state_.reset();
}

}  // namespace torchrpc::native
