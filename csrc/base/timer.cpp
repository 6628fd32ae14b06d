#include "base/timer.h"

#include <thread>
#include <utility>

#include "base/executor/start_thread.h"
#include "base/os/threads.h"
#include "base/sync/mutex.h"
#include "base/timer_schedule.h"

namespace torchrpc {

namespace {

class ThreadTimer : public Timer {
 public:
  ThreadTimer() : thread_(startThread("of the timer", [this] { run(); })) {}
  ~ThreadTimer() override { close(); }

  TimePoint now() const override { return std::chrono::steady_clock::now(); }

  Id at(TimePoint when, std::function<void()> task) override {
    const auto added = schedule_.add(when, std::move(task));
    if (added.id == 0) return 0;
    if (added.is_first) schedule_.wake();
    return added.id;
  }

  bool cancel(Id id) override { return schedule_.cancel(id); }

  void close() override {
    schedule_.close();
    std::thread thread;
    {
      MutexLock lock(mutex_);
      // If a task closes its own timer, the destructor joins the thread.
      if (thread_.get_id() != std::this_thread::get_id()) thread.swap(thread_);
    }
    if (thread.joinable()) thread.join();
  }

 private:
  void run() {
    os::setThreadName("torchrpc-timer");
    do {
      while (schedule_.runNext(now(), [](TimePoint) {})) {
      }
    } while (schedule_.waitUntilDue());
  }

  TimerSchedule schedule_;
  Mutex mutex_;
  std::thread thread_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Timer> makeThreadTimer() { return std::make_unique<ThreadTimer>(); }

}  // namespace torchrpc
