#include "transport/ucx/async_thread.h"

#include <utility>

namespace torchrpc::ucx {

AsyncThreadPause::AsyncThreadPause(const Libucp& ucp) : ucp_(ucp) {
  constexpr ucs_time_t kAtOnce = 1;
  // The timer fires again and again until it is removed. Only its first callback waits.
  const auto status =
      ucp_.ucs_async_add_timer(UCS_ASYNC_MODE_THREAD_SPINLOCK, kAtOnce, &onTimer, this, /*async=*/nullptr, &timer_);
  if (status != UCS_OK) {
    timer_ = kNone;
    return;
  }
  begun_.get_future().wait();
}

AsyncThreadPause::~AsyncThreadPause() {
  if (timer_ == kNone) return;
  ended_.set_value();
  ucp_.ucs_async_remove_handler(timer_, /*sync=*/1);
}

void AsyncThreadPause::onTimer(int /*timer*/, ucs_event_set_types_t /*events*/, void* self) {
  auto& pause = *static_cast<AsyncThreadPause*>(self);
  if (std::exchange(pause.has_waited_, true)) return;
  pause.begun_.set_value();
  pause.ended_.get_future().wait();
}

}  // namespace torchrpc::ucx
