#include "transport/native/loop/event_loop.h"

#include <algorithm>
#include <pthread.h>
#include <sched.h>
#include <utility>
#include <uv.h>

#include "base/error.h"
#include "base/executor/scheduling.h"

namespace torchrpc::native {

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
// where one will do. So one thread, the *sleeper*, sleeps on the wait_words of the rings themselves (futexes in their
// shared memory) and on an waiter that others ring for it; the loop sleeps on, as nothing rings for it. The sleeper has
// no turn while it sleeps, so that the loop and other threads go on, and takes one when it is woken. Rings it does not
// sleep on, and sockets, are the loop's. A sleeper may leave while another thread has the turn. That thread has perhaps
// just armed the rings for it: whoever gives the turn away looks afterwards whether the sleeper that it armed for is
// still there, and arms again if not. A thread of the pool that has nothing to do gives way to one that waits for a
// reply.
constexpr auto kLongYield = std::chrono::microseconds(20);
constexpr auto kTimeSlice = std::chrono::microseconds(500);
constexpr int kShortRest = 2;
constexpr int kLongRest = 50;
constexpr auto kLongestTurn = std::chrono::milliseconds(5);
constexpr int kIdleRounds = 8;  // without news, until a ring is no longer looked at

thread_local const EventLoop* current_loop = nullptr;

auto now() { return std::chrono::steady_clock::now(); }

}  // namespace

struct EventLoop::State {
  uv_loop_t loop;
  uv_async_t wake;
};

struct EventLoop::Handle {
  union {
    uv_handle_t any;
    uv_poll_t poll;
    uv_timer_t timer;
  };
  Callback callback;

  static Handle& of(void* handle) { return *static_cast<Handle*>(static_cast<uv_handle_t*>(handle)->data); }
};

// ---- watches ----

EventLoop::Watch::~Watch() {
  if (handle_) uv_close(&handle_->any, [](uv_handle_t* handle) { delete &Handle::of(handle); });
}

void EventLoop::Watch::want(bool readable, bool writable) {
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

EventLoop::Watch EventLoop::watch(int fd, Callback callback) {
  auto handle = std::make_unique<Handle>();
  handle->callback = std::move(callback);
  if (const int error = uv_poll_init(&state_->loop, &handle->poll, fd); error != 0) {
    throw Error(ErrorCode::kWorkerLost, std::string("a descriptor cannot be watched: ") + uv_strerror(error));
  }
  handle->any.data = handle.get();
  return Watch(handle.release());
}

EventLoop::Watch EventLoop::after(Duration delay, std::function<void()> callback) {
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

EventLoop::EventLoop(Duration longest_spin)
    : longest_spin_(longest_spin), state_(std::make_unique<State>()), scratch_(kScratchBytes) {
  int error = uv_loop_init(&state_->loop);
  if (error == 0) {
    error = uv_async_init(
        &state_->loop, &state_->wake, [](uv_async_t* wake) { static_cast<EventLoop*>(wake->loop->data)->lockLoop(); });
    if (error != 0) uv_loop_close(&state_->loop);
  }
  if (error != 0) {
    throw Error(ErrorCode::kRendezvous, std::string("the transport's event loop cannot start: ") + uv_strerror(error));
  }
  state_->loop.data = this;
  thread_ = std::thread([this] { run(); });
}

EventLoop::~EventLoop() { stop(); }

bool EventLoop::inLoop() const { return current_loop == this; }

bool EventLoop::post(std::function<void()> task) {
  MutexLock lock(mutex_);
  if (stopped_) return false;
  tasks_.push_back(std::move(task));
  has_tasks_ = true;
  // Under the lock: what wakes the loop is closed once it has stopped.
  if (sleeping_) uv_async_send(&state_->wake);
  return true;
}

void EventLoop::stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    has_tasks_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

void EventLoop::run() {
  current_loop = this;
  pthread_setname_np(pthread_self(), "torchrpc_loop");
  // In a burst of messages the loop is woken for every few, and the thread that sends them would lose its core each
  // time.
  Scheduling().applyBatchPolicy();
  lockLoop();
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
    const bool awake = !sleeping_ || has_tasks_ || !unlockLoop();
    do {
      uv_run(&state_->loop, awake ? UV_RUN_NOWAIT : UV_RUN_ONCE);
    } while (!has_loop_lock_);
    sleeping_ = false;
  }
  do {
    armAll();
  } while (!unlockLoop());
  uv_close(reinterpret_cast<uv_handle_t*>(&state_->wake), nullptr);
  uv_run(&state_->loop, UV_RUN_DEFAULT);
  uv_loop_close(&state_->loop);
}

void EventLoop::lockLoop() {
  if (std::exchange(has_loop_lock_, true)) return;
  loop_thread_waits_ = true;
  loop_mutex_.lock();
  loop_thread_waits_ = false;
}

bool EventLoop::unlockLoop() {
  has_loop_lock_ = has_loop_lock_ && !unlockTurn();
  if (has_loop_lock_) unarmed_ = true;
  return !has_loop_lock_;
}

void EventLoop::wake() {
  MutexLock lock(mutex_);
  if (!stopped_) uv_async_send(&state_->wake);
}

void EventLoop::runTasks() {
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

void EventLoop::addToPollSet(Pollable& spinner) {
  unarmed_ = true;
  for (auto& hot : hot_) {
    if (hot.spinner != &spinner) continue;
    hot.idle_rounds = 0;
    return;
  }
  hot_.push_back({&spinner});
}

void EventLoop::removeFromPollSet(Pollable& spinner) {
  for (auto& hot : hot_) {
    if (hot.spinner == &spinner) hot.spinner = nullptr;
  }
}

bool EventLoop::pollAll() {
  bool any = false;
  // By index: those that are polled may heat others, or forget themselves.
  for (size_t i = 0; i < hot_.size(); ++i) {
    if (!hot_[i].spinner || !hot_[i].spinner->poll()) continue;
    hot_[i].idle_rounds = 0;
    any = true;
  }
  return any;
}

bool EventLoop::isBusy() const {
  return std::ranges::any_of(hot_, [](const Hot& hot) { return hot.spinner && hot.spinner->keepsLoopBusy(); });
}

EventLoop::PollHint EventLoop::pollHint() const {
  auto best = PollHint::kNone;
  for (const auto& hot : hot_) {
    if (hot.spinner) best = std::max(best, hot.spinner->pollHint());
  }
  return best;
}

void EventLoop::awaitComing() {
  const auto latest = now() + longest_spin_;
  while (pollHint() == PollHint::kWriteInProgress && !has_tasks_ && now() < latest) {
    if (!yield()) break;
    pollAll();
  }
}

bool EventLoop::armAll() {
  bool quiet = true;
  const bool sleeps = sleeper_ != nullptr;
  armed_for_thread_ = false;
  for (auto& hot : hot_) {
    ++hot.idle_rounds;
    hot.slept_on = hot.slept_on && sleeps;
    armed_for_thread_ = armed_for_thread_ || hot.slept_on;
    if (!hot.spinner || hot.spinner->arm(hot.slept_on ? WakeTarget::kThread : WakeTarget::kLoop)) continue;
    hot.idle_rounds = 0;  // stays: nobody will ring for what has come before
    quiet = false;
  }
  // What is slept on stays until it is armed for the loop again.
  std::erase_if(hot_, [](const Hot& hot) { return !hot.spinner || (hot.idle_rounds > kIdleRounds && !hot.slept_on); });
  return quiet;
}

bool EventLoop::armHot() {
  unarmed_ = !armAll();
  if (unarmed_) pollAll();
  return !unarmed_;
}

bool EventLoop::yield() {
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

void EventLoop::poll(const std::function<bool()>& done) {
  if (longest_spin_ == Duration::zero() || now() < rest_until_.load() || !awaitTurn(done)) return;
  look(done);
  leaveTurn();
}

bool EventLoop::awaitTurn(const std::function<bool()>& done) {
  const auto latest = now() + longest_spin_;
  while (loop_thread_waits_ || !loop_mutex_.try_lock()) {
    if (done() || now() > latest || !yield()) return false;
  }
  return true;
}

void EventLoop::look(const std::function<bool()>& done) {
  for (auto& hot : hot_) {
    if (hot.spinner) hot.spinner->disarm();
  }
  auto heard = now();
  const auto latest = heard + kLongestTurn;
  for (bool alone = true; !done() && now() < latest && !isBusy();) {
    if (pollAll()) {
      heard = now();
      alone = true;
    } else if (!alone || (now() > heard + longest_spin_ && pollHint() == PollHint::kNone)) {
      break;
    } else {
      alone = yield();
    }
  }
}

void EventLoop::leaveTurn() {
  do {
    if (armAll()) continue;
    unarmed_ = true;
    wake();
  } while (!unlockTurn());
}

bool EventLoop::unlockTurn() {
  const bool for_thread = armed_for_thread_;
  loop_mutex_.unlock();
  return !for_thread || sleeper_ != nullptr || !loop_mutex_.try_lock();
}

// ---- the sleeper ----

bool EventLoop::enterSleep(FutexWaiter& waiter, bool preemptible) {
  MutexLock lock(mutex_);
  auto* before = sleeper_.load();
  if (before && !sleeper_gives_way_) return false;
  sleeper_ = &waiter;
  sleeper_gives_way_ = preemptible;
  // Under the lock: it leaves under the lock.
  if (before) before->ring();
  return true;
}

std::vector<FutexWaiter::WaitWord> EventLoop::collectWaitWords() {
  std::vector<FutexWaiter::WaitWord> wait_words;
  for (auto& hot : hot_) {
    const bool worth_it =
        hot.spinner && hot.idle_rounds <= kIdleRounds && wait_words.size() < FutexWaiter::kMaxWaitWords;
    auto bell = worth_it ? hot.spinner->waitWord() : std::nullopt;
    hot.slept_on = bell.has_value();
    if (bell) wait_words.push_back(*std::move(bell));
  }
  return wait_words;
}

bool EventLoop::leaveSleep(const FutexWaiter& waiter) {
  MutexLock lock(mutex_);
  if (!isSleeper(waiter)) return false;
  sleeper_ = nullptr;
  return true;
}

void EventLoop::sleep(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint latest, bool preemptible) {
  if (!FutexWaiter::isAvailable() || done() || !awaitTurn(done)) return;
  bool in_turn = true;
  for (bool here = enterSleep(waiter, preemptible); here;) {
    const auto wait_words = collectWaitWords();
    if (wait_words.empty() || !armAll() || !unlockTurn()) break;
    waiter.sleep([&] { return done() || !isSleeper(waiter); }, wait_words, latest);
    here = isSleeper(waiter) && !done() && now() < latest;
    in_turn = here && awaitTurn(done);
    if (!in_turn) break;
    look(done);
    here = isSleeper(waiter) && !done();
  }
  const bool replaced = !leaveSleep(waiter);
  // What has woken who is replaced was perhaps meant for the other. Whoever else has the turn arms for the loop.
  if (!in_turn && replaced) loop_mutex_.lock();
  if (in_turn || replaced || loop_mutex_.try_lock()) leaveTurn();
}

}  // namespace torchrpc::native
