#include "transport/native_loop.h"

#include <pthread.h>
#include <sched.h>
#include <utility>
#include <uv.h>

#include "base/error.h"

namespace torchrpc {

namespace {

constexpr size_t kScratchBytes = 64 << 10;
// While it spins the loop asks libuv for news this often: sockets and timers must not wait for the rings.
constexpr auto kUvInterval = std::chrono::microseconds(25);

// Note [Spinning]
// A message that finds the loop awake saves the two system calls and the scheduler's 5 to 10 µs of being woken. So the
// loop looks at the rings that have been busy for a while before it sleeps, and yields between two looks: a thread that
// is ready to run goes first. Spinning that finds nothing uses up credit, without which the loop sleeps at once and
// tries only now and then; where others need the cores it has none left, and tries ever less often: who yields there
// is back after milliseconds, who sleeps and is woken much sooner.
constexpr int kMostCredit = 8;
constexpr unsigned kSpinAgain = 16, kSpinAgainAtMost = 1 << 14;
constexpr auto kLongYield = std::chrono::microseconds(20);
constexpr int kIdleRounds = 8;  // without news, until a ring is no longer looked at

thread_local const NativeLoop* current_loop = nullptr;

auto now() { return std::chrono::steady_clock::now(); }

}  // namespace

struct NativeLoop::State {
  uv_loop_t loop;
  uv_async_t wake;
};

struct NativeLoop::Handle {
  union {
    uv_handle_t any;
    uv_poll_t poll;
    uv_timer_t timer;
  };
  Callback callback;

  static Handle& of(void* handle) { return *static_cast<Handle*>(static_cast<uv_handle_t*>(handle)->data); }
};

// ---- watches ----

NativeLoop::Watch::~Watch() {
  if (handle_) uv_close(&handle_->any, [](uv_handle_t* handle) { delete &Handle::of(handle); });
}

void NativeLoop::Watch::want(bool readable, bool writable) {
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

NativeLoop::Watch NativeLoop::watch(int fd, Callback callback) {
  auto handle = std::make_unique<Handle>();
  handle->callback = std::move(callback);
  if (const int error = uv_poll_init(&state_->loop, &handle->poll, fd); error != 0) {
    throw Error(ErrorCode::kWorkerLost, std::string("a descriptor cannot be watched: ") + uv_strerror(error));
  }
  handle->any.data = handle.get();
  return Watch(handle.release());
}

NativeLoop::Watch NativeLoop::after(Duration delay, std::function<void()> callback) {
  auto handle = std::make_unique<Handle>();
  handle->callback = [callback = std::move(callback)](Ready) { callback(); };
  uv_timer_init(&state_->loop, &handle->timer);
  handle->any.data = handle.get();
  const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(delay).count();
  // libuv counts from when it last looked at the clock.
  uv_update_time(&state_->loop);
  uv_timer_start(
      &handle->timer, [](uv_timer_t* timer) { Handle::of(timer).callback({}); },
      static_cast<uint64_t>(std::max<int64_t>(0, milliseconds)), 0);
  return Watch(handle.release());
}

// ---- the thread ----

NativeLoop::NativeLoop(Duration longest_spin)
    : longest_spin_(longest_spin), state_(std::make_unique<State>()), scratch_(kScratchBytes) {
  int error = uv_loop_init(&state_->loop);
  if (error == 0) {
    error = uv_async_init(&state_->loop, &state_->wake, [](uv_async_t*) {});
    if (error != 0) uv_loop_close(&state_->loop);
  }
  if (error != 0) {
    throw Error(ErrorCode::kRendezvous, std::string("the transport's event loop cannot start: ") + uv_strerror(error));
  }
  thread_ = std::thread([this] { run(); });
}

NativeLoop::~NativeLoop() { stop(); }

bool NativeLoop::inLoop() const { return current_loop == this; }

bool NativeLoop::post(std::function<void()> task) {
  MutexLock lock(mutex_);
  if (stopped_) return false;
  tasks_.push_back(std::move(task));
  has_tasks_ = true;
  // Under the lock: what wakes the loop is closed once it has stopped.
  if (sleeping_) uv_async_send(&state_->wake);
  return true;
}

void NativeLoop::stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    has_tasks_ = true;
    if (!stopped_) uv_async_send(&state_->wake);
  }
  if (thread_.joinable()) thread_.join();
}

void NativeLoop::run() {
  current_loop = this;
  pthread_setname_np(pthread_self(), "torchrpc_loop");
  for (;;) {
    runTasks();
    {
      MutexLock lock(mutex_);
      if (stopping_ && tasks_.empty()) {
        stopped_ = true;
        break;
      }
    }
    if (spin() && now() - asked_uv_ < kUvInterval) continue;
    sleeping_ = !unarmed_;
    // After the flag is up: who posts now wakes us.
    const bool awake = !sleeping_ || has_tasks_;
    uv_run(&state_->loop, awake ? UV_RUN_NOWAIT : UV_RUN_ONCE);
    sleeping_ = false;
    asked_uv_ = now();
  }
  uv_close(reinterpret_cast<uv_handle_t*>(&state_->wake), nullptr);
  uv_run(&state_->loop, UV_RUN_DEFAULT);
  uv_loop_close(&state_->loop);
}

void NativeLoop::runTasks() {
  if (!has_tasks_) return;
  std::vector<std::function<void()>> batch;
  {
    MutexLock lock(mutex_);
    batch.swap(tasks_);
    has_tasks_ = stopping_;
  }
  for (auto& task : batch) std::exchange(task, nullptr)();
}

// ---- spinning ----

void NativeLoop::heat(Spinner& spinner) {
  unarmed_ = true;
  for (auto& hot : hot_) {
    if (hot.spinner != &spinner) continue;
    hot.idle_rounds = 0;
    return;
  }
  hot_.push_back({&spinner});
}

void NativeLoop::forget(Spinner& spinner) {
  for (auto& hot : hot_) {
    if (hot.spinner == &spinner) hot.spinner = nullptr;
  }
}

bool NativeLoop::pollAll() {
  bool any = false;
  // By index: those that are polled may heat others, or forget themselves.
  for (size_t i = 0; i < hot_.size(); ++i) {
    if (!hot_[i].spinner || !hot_[i].spinner->poll()) continue;
    hot_[i].idle_rounds = 0;
    any = true;
  }
  return any;
}

bool NativeLoop::armAll() {
  bool quiet = true;
  for (auto& hot : hot_) {
    ++hot.idle_rounds;
    if (!hot.spinner || hot.spinner->arm()) continue;
    hot.idle_rounds = 0;  // stays: nobody will ring for what has come before
    quiet = false;
  }
  std::erase_if(hot_, [](const Hot& hot) { return !hot.spinner || hot.idle_rounds > kIdleRounds; });
  return quiet;
}

bool NativeLoop::spin() {
  if (hot_.empty()) return false;
  const bool worth_it = longest_spin_ > Duration::zero() && (credit_ > 0 || ++unspun_ >= spin_again_);
  if (worth_it && lookAround()) return true;
  if (!worth_it && !unarmed_) return false;
  unarmed_ = false;
  if (armAll()) return false;
  pollAll();
  unarmed_ = true;
  return true;
}

bool NativeLoop::lookAround() {
  unarmed_ = true;
  unspun_ = 0;
  for (auto& hot : hot_) {
    if (hot.spinner) hot.spinner->disarm();
  }
  const auto until = now() + longest_spin_;
  for (auto before = now(); before < until;) {
    if (pollAll()) {
      credit_ = std::min(credit_ + 1, kMostCredit);
      spin_again_ = kSpinAgain;
      return true;
    }
    if (has_tasks_) return true;
    ::sched_yield();
    const auto after = now();
    if (after - before > kLongYield) {
      credit_ = 0;
      spin_again_ = std::min(spin_again_ * 2, kSpinAgainAtMost);
      return false;
    }
    before = after;
  }
  credit_ = std::max(credit_ - 1, 0);
  return false;
}

}  // namespace torchrpc
