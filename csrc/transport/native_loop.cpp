#include "transport/native_loop.h"

#include <algorithm>
#include <pthread.h>
#include <sched.h>
#include <utility>
#include <uv.h>

#include "base/error.h"
#include "base/scheduling.h"

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
// The loop itself takes the turn for what concerns rings and frames: strangers, who come and go at the door, disturb
// nobody who looks.
//
// Note [Sleeping in the loop's place]
// Who has looked in vain sleeps. If the loop woke up for what it waits for, and woke it then, that would be two wakings
// where one will do. So one thread, the *sleeper*, sleeps on the bells of the rings themselves (futexes in their shared
// memory) and on an alarm that others ring for it; the loop sleeps on, as nothing rings for it. The sleeper has no turn
// while it sleeps, so that the loop and other threads go on, and takes one when it is woken. Rings it does not sleep
// on, and sockets, are the loop's. A sleeper may leave while another thread has the turn. That thread has perhaps just
// armed the rings for it: whoever gives the turn away looks afterwards whether the sleeper that it armed for is still
// there, and arms again if not. A thread of the pool that has nothing to do gives way to one that waits for a reply.
constexpr auto kLongYield = std::chrono::microseconds(20);
constexpr auto kTimeSlice = std::chrono::microseconds(500);
constexpr int kShortRest = 2;
constexpr int kLongRest = 50;
constexpr auto kLongestTurn = std::chrono::milliseconds(5);
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
    error = uv_async_init(
        &state_->loop, &state_->wake, [](uv_async_t* wake) { static_cast<NativeLoop*>(wake->loop->data)->takeTurn(); });
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
  // In a burst of messages the loop is woken for every few, and the thread that sends them would lose its core each
  // time.
  Scheduling().applyGently();
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
    const bool awake = !sleeping_ || has_tasks_ || !giveTurn();
    do {
      uv_run(&state_->loop, awake ? UV_RUN_NOWAIT : UV_RUN_ONCE);
    } while (!has_turn_);
    sleeping_ = false;
  }
  do {
    armAll();
  } while (!giveTurn());
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

bool NativeLoop::giveTurn() {
  has_turn_ = has_turn_ && !unlockTurn();
  if (has_turn_) unarmed_ = true;
  return !has_turn_;
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
  const bool sleeps = sleeper_ != nullptr;
  armed_for_thread_ = false;
  for (auto& hot : hot_) {
    ++hot.idle_rounds;
    hot.slept_on = hot.slept_on && sleeps;
    armed_for_thread_ = armed_for_thread_ || hot.slept_on;
    if (!hot.spinner || hot.spinner->arm(hot.slept_on ? Sleeper::kThread : Sleeper::kLoop)) continue;
    hot.idle_rounds = 0;  // stays: nobody will ring for what has come before
    quiet = false;
  }
  // What is slept on stays until it is armed for the loop again.
  std::erase_if(hot_, [](const Hot& hot) { return !hot.spinner || (hot.idle_rounds > kIdleRounds && !hot.slept_on); });
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
  if (longest_spin_ == Duration::zero() || now() < rest_until_.load() || !awaitTurn(done)) return;
  look(done);
  leaveTurn();
}

bool NativeLoop::awaitTurn(const std::function<bool()>& done) {
  const auto latest = now() + longest_spin_;
  while (waits_for_turn_ || !turn_.try_lock()) {
    if (done() || now() > latest || !yield()) return false;
  }
  return true;
}

void NativeLoop::look(const std::function<bool()>& done) {
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
}

void NativeLoop::leaveTurn() {
  do {
    if (armAll()) continue;
    unarmed_ = true;
    wake();
  } while (!unlockTurn());
}

bool NativeLoop::unlockTurn() {
  const bool for_thread = armed_for_thread_;
  turn_.unlock();
  return !for_thread || sleeper_ != nullptr || !turn_.try_lock();
}

// ---- the sleeper ----

bool NativeLoop::enterSleep(Alarm& alarm, bool gives_way) {
  MutexLock lock(mutex_);
  auto* before = sleeper_.load();
  if (before && !sleeper_gives_way_) return false;
  sleeper_ = &alarm;
  sleeper_gives_way_ = gives_way;
  // Under the lock: it leaves under the lock.
  if (before) before->ring();
  return true;
}

std::vector<Alarm::Bell> NativeLoop::takeBells() {
  std::vector<Alarm::Bell> bells;
  for (auto& hot : hot_) {
    const bool worth_it = hot.spinner && hot.idle_rounds <= kIdleRounds && bells.size() < Alarm::kMostBells;
    auto bell = worth_it ? hot.spinner->bell() : std::nullopt;
    hot.slept_on = bell.has_value();
    if (bell) bells.push_back(*std::move(bell));
  }
  return bells;
}

bool NativeLoop::leaveSleep(const Alarm& alarm) {
  MutexLock lock(mutex_);
  if (!isSleeper(alarm)) return false;
  sleeper_ = nullptr;
  return true;
}

void NativeLoop::sleep(const std::function<bool()>& done, Alarm& alarm, TimePoint latest, bool gives_way) {
  if (!Alarm::isAvailable() || done() || !awaitTurn(done)) return;
  bool in_turn = true;
  for (bool here = enterSleep(alarm, gives_way); here;) {
    const auto bells = takeBells();
    if (bells.empty() || !armAll() || !unlockTurn()) break;
    alarm.sleep([&] { return done() || !isSleeper(alarm); }, bells, latest);
    here = isSleeper(alarm) && !done() && now() < latest;
    in_turn = here && awaitTurn(done);
    if (!in_turn) break;
    look(done);
    here = isSleeper(alarm) && !done();
  }
  const bool replaced = !leaveSleep(alarm);
  // What has woken who is replaced was perhaps meant for the other. Whoever else has the turn arms for the loop.
  if (!in_turn && replaced) turn_.lock();
  if (in_turn || replaced || turn_.try_lock()) leaveTurn();
}

}  // namespace torchrpc
