#include "testing/manual_timer.h"

#include <algorithm>
#include <utility>

#include "base/sync/mutex.h"
#include "base/timer_schedule.h"

namespace torchrpc {

struct ManualTimer::State {
  TimerSchedule schedule;
  mutable Mutex mutex;
  TimePoint now TORCHRPC_GUARDED_BY(mutex){};

  void set(TimePoint time) {
    MutexLock lock(mutex);
    now = time;
  }
};

ManualTimer::ManualTimer() : state_(std::make_unique<State>()) {}
ManualTimer::~ManualTimer() { close(); }

TimePoint ManualTimer::now() const {
  MutexLock lock(state_->mutex);
  return state_->now;
}

Timer::Id ManualTimer::at(TimePoint when, std::function<void()> task) {
  return state_->schedule.add(when, std::move(task)).id;
}

bool ManualTimer::cancel(Id id) { return state_->schedule.cancel(id); }
void ManualTimer::close() { state_->schedule.close(); }
size_t ManualTimer::pending() const { return state_->schedule.size(); }

void ManualTimer::advance(Duration by) {
  const TimePoint until = now() + by;
  // A task whose time has passed already does not set the clock back.
  while (state_->schedule.runNext(until, [&](TimePoint when) { state_->set(std::max(when, now())); })) {
  }
  state_->set(until);
}

}  // namespace torchrpc
