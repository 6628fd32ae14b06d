#include "transport/native_loop.h"

#include <algorithm>
#include <pthread.h>
#include <sched.h>
#include <utility>
#include <uv.h>

#include "base/error.h"

namespace torchrpc {

namespace {

constexpr size_t kScratchBytes = 64 << 10;

// Note [Spinning]
// A message that finds somebody looking saves the system calls and the 5 to 50 µs that it takes to wake a thread. So a
// thread that is about to wait for a message, or for a task that a message may bring, *assists*: it takes the loop's
// turn and polls the rings that have been busy, and has its message without another thread's help. (What only the loop
// may do, which is all that touches libuv, it posts.) The loop itself sleeps as soon as it can: it would be in the way.
// Only if a peer has rung ahead, and is about to have copied something large, it looks for that.
// Who looks yields between two looks, so that a thread which is ready to run goes first. A look after a yield that took
// long, and found nothing, is the last: others need the cores, and who sleeps is back sooner than who yields. After one
// that took a time slice nobody looks for kShortRest times as long: the machine has more work than cores. Perhaps it
// had so once; a rest that is needed again within its own length is twice as long, up to kLongRest time slices. An
// assistant gives the turn back after kLongestTurn whatever comes, and none begins while the loop waits for it. Whoever
// gives the turn away has armed all rings before: then a message rings, and the loop wakes up for it.
constexpr auto kLongYield = std::chrono::microseconds(20);
constexpr auto kTimeSlice = std::chrono::microseconds(500);
constexpr int kShortRest = 2;
constexpr int kLongRest = 50;
constexpr auto kLongestTurn = std::chrono::milliseconds(5);
constexpr int kIdleRounds = 8;  // without news, until a ring is no longer looked at

thread_local const NativeLoop* current_loop = nullptr;

auto now() { return std::chrono::steady_clock::now(); }

/// From now on this thread, when it is woken, takes no core from one that runs: in a burst of messages the loop is
/// woken for every few, and the thread that sends them would lose its core each time. An idle core it has at once.
void preemptNobody() {
  int policy = 0;
  sched_param parameters{};
  if (pthread_getschedparam(pthread_self(), &policy, &parameters) == 0 && policy == SCHED_OTHER) {
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &parameters);
  }
}

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
  static void call(void* handle, Ready ready) {
    static_cast<NativeLoop*>(static_cast<uv_handle_t*>(handle)->loop->data)->takeTurn();
    of(handle).callback(ready);
  }
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
    Handle::call(poll, {failed || (events & UV_READABLE), failed || (events & UV_WRITABLE), failed});
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
      &handle->timer, [](uv_timer_t* timer) { Handle::call(timer, {}); },
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
  state_->loop.data = this;
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
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

void NativeLoop::run() {
  current_loop = this;
  pthread_setname_np(pthread_self(), "torchrpc_loop");
  preemptNobody();
  takeTurn();
  for (;;) {
    runTasks();
    {
      MutexLock lock(mutex_);
      if (stopping_ && tasks_.empty()) {
        stopped_ = true;
        break;
      }
    }
    if (unarmed_) awaitComing();
    sleeping_ = !unarmed_ || armHot();
    // After the flag is up: who posts now wakes us.
    const bool awake = !sleeping_ || has_tasks_;
    if (!awake) giveTurn();
    uv_run(&state_->loop, awake ? UV_RUN_NOWAIT : UV_RUN_ONCE);
    takeTurn();
    sleeping_ = false;
  }
  giveTurn();
  uv_close(reinterpret_cast<uv_handle_t*>(&state_->wake), nullptr);
  uv_run(&state_->loop, UV_RUN_DEFAULT);
  uv_loop_close(&state_->loop);
}

void NativeLoop::takeTurn() {
  if (std::exchange(has_turn_, true)) return;
  waits_for_turn_ = true;
  turn_.lock();
  waits_for_turn_ = false;
}

void NativeLoop::giveTurn() {
  if (std::exchange(has_turn_, false)) turn_.unlock();
}

void NativeLoop::wake() {
  MutexLock lock(mutex_);
  if (!stopped_) uv_async_send(&state_->wake);
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

// ---- what is hot ----

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

bool NativeLoop::isBusy() const {
  return std::ranges::any_of(hot_, [](const Hot& hot) { return hot.spinner && hot.spinner->keepsLoopBusy(); });
}

NativeLoop::Outlook NativeLoop::outlook() const {
  auto best = Outlook::kNone;
  for (const auto& hot : hot_) {
    if (hot.spinner) best = std::max(best, hot.spinner->outlook());
  }
  return best;
}

void NativeLoop::awaitComing() {
  const auto latest = now() + longest_spin_;
  while (outlook() == Outlook::kComing && !has_tasks_ && now() < latest) {
    if (!yield()) break;
    pollAll();
  }
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

bool NativeLoop::armHot() {
  unarmed_ = !armAll();
  if (unarmed_) pollAll();
  return !unarmed_;
}

bool NativeLoop::yield() {
  const auto before = now();
  ::sched_yield();
  const auto away = now() - before;
  if (away >= kTimeSlice) {
    const Duration last = rest_;
    const bool again = before < rest_until_.load() + last;
    const Duration rest = again ? std::min<Duration>(2 * last, kLongRest * away) : kShortRest * away;
    rest_ = rest;
    rest_until_ = before + away + rest;
  }
  return away <= kLongYield;
}

void NativeLoop::assist(const std::function<bool()>& done) {
  const auto begin = now();
  if (longest_spin_ == Duration::zero() || begin < rest_until_.load()) return;
  std::unique_lock turn(turn_, std::defer_lock);
  while (waits_for_turn_ || !turn.try_lock()) {
    if (done() || now() > begin + longest_spin_ || !yield()) return;
  }
  for (auto& hot : hot_) {
    if (hot.spinner) hot.spinner->disarm();
  }
  auto heard = now();
  const auto latest = heard + kLongestTurn;
  for (bool alone = true; !done() && now() < latest && !isBusy();) {
    if (pollAll()) {
      heard = now();
      alone = true;
    } else if (!alone || (now() > heard + longest_spin_ && outlook() == Outlook::kNone)) {
      break;
    } else {
      alone = yield();
    }
  }
  if (!armAll()) {
    unarmed_ = true;
    wake();
  }
}

}  // namespace torchrpc
