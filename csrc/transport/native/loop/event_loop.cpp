#include "transport/native/loop/event_loop.h"

#include <chrono>
#include <functional>
#include <utility>

#include "base/executor/scheduling.h"
#include "base/executor/start_thread.h"
#include "base/os/threads.h"

namespace torchrpc::native {

namespace {

constexpr size_t kScratchBytes = 64 << 10;

// Note [Busy polling]
// Polling for a message saves the system calls and the 5 to 50 µs of a wake-up. So a thread that is about to wait for a
// message, or for a task that a message may bring, polls first: it acquires the loop lock, polls the connections that
// have been active, and receives its message without the help of another thread. Only the loop thread may use libuv; a
// polling thread posts a task for that. The loop thread itself blocks as soon as it can, because it would compete with
// the polling threads. It polls only when a peer has sent a wake-up ahead of time, shortly before the end of a large
// copy.
// A polling thread yields between two polls, so that other runnable threads run first. If a yield took longer than
// kLongYield and the next poll finds nothing, the thread stops polling: other threads need the cores, and a thread that
// sleeps is scheduled sooner than one that yields. If a yield took at least kTimeSlice, the machine has more runnable
// threads than cores, and no thread begins to poll during a pause of kFirstPauseYields times the length of the yield.
// That yield may have been an exception. But if another pause becomes necessary soon after a pause (within the length
// of that pause), the new one is twice as long, up to kMaxPauseYields times the yield. These constants are in
// spin_backoff.cpp.
// A polling thread releases the loop lock after kMaxSpin even if messages keep arriving, and no thread begins to poll
// while the loop thread waits for the lock (LoopLock). Before a thread releases the lock, it arms all pollables: then
// each peer sends a wake-up with its next message, and the loop thread receives that message.
// The loop thread acquires the lock only for rings and frames. It handles unauthenticated sockets without the lock, so
// peers that connect do not disturb threads that poll.
//
// Note [Leader/Followers]
// A thread that has polled without result parks. If the loop thread received the message and then woke the parked
// thread, the message would cost two wake-ups where one is enough. So one of the waiting threads, the leader, parks on
// the wait words of the rings themselves (futexes in shared memory) and on a FutexWaiter, which threads of its own
// process notify. The loop thread stays blocked, because no peer wakes it. The followers sleep elsewhere.
// The leader does not hold the loop lock while it is parked, so that the loop thread and other threads can work; it
// acquires the lock when it is woken. The loop thread serves sockets, and rings on which the leader is not parked.
// The leader may leave while another thread holds the lock, and that thread may just have armed the rings for the
// leader. So each thread that releases the lock checks afterwards whether the leader for which it has armed still
// exists; if not, it arms again: Note [Unlock, then look] in loop_lock.h. An idle thread of the pool is preemptible: a
// thread that waits for a reply replaces it as the leader.
constexpr auto kMaxSpin = std::chrono::milliseconds(5);

using SteadyClock = std::chrono::steady_clock;

thread_local const EventLoop* current_loop = nullptr;

}  // namespace

EventLoop::EventLoop(Duration spin_budget)
    : spin_budget_(spin_budget),
      uv_([this] { lockLoop(); }),
      tasks_([this] { uv_.wake(); }),
      scratch_(kScratchBytes),
      thread_(startThread("of the transport's event loop", [this] { run(); })) {}

EventLoop::~EventLoop() { stop(); }

bool EventLoop::inLoop() const { return current_loop == this; }

void EventLoop::stop() {
  tasks_.stop();
  if (thread_.joinable()) thread_.join();
}

// ---- the loop thread ----

void EventLoop::run() {
  current_loop = this;
  os::setThreadName("torchrpc_loop");
  // A burst of messages wakes the loop thread once for every few messages. Without SCHED_BATCH, it would preempt the
  // thread that sends them at each wake-up.
  Scheduling().applyBatchPolicy();
  lockLoop();
  for (;;) {
    tasks_.runPosted();
    if (tasks_.closeIfDrained()) break;
    if (needs_arming_) pollForWrites();
    const bool quiet = !needs_arming_ || armOrPoll();
    tasks_.setNeedsWake(quiet);
    // Checked only after setNeedsWake(): a thread that posts later wakes the loop thread.
    const bool may_block = quiet && !tasks_.hasTasks() && unlockLoop();
    // If this thread does not hold the lock, runOnce() is repeated until a callback has acquired it.
    do {
      uv_.runOnce(may_block);
    } while (!has_loop_lock_);
    tasks_.setNeedsWake(false);
  }
  do {
    arm();
  } while (!unlockLoop());
  uv_.close();
}

void EventLoop::lockLoop() {
  if (!std::exchange(has_loop_lock_, true)) loop_lock_.lockFromLoopThread();
}

bool EventLoop::unlockLoop() {
  has_loop_lock_ = !releaseLock() && loop_lock_.fenceAndTryLock();
  if (has_loop_lock_) needs_arming_ = true;
  return !has_loop_lock_;
}

bool EventLoop::armOrPoll() {
  needs_arming_ = !arm();
  if (needs_arming_) poll_set_.poll();
  return !needs_arming_;
}

void EventLoop::pollForWrites() {
  const auto deadline = SteadyClock::now() + spin_budget_;
  while (poll_set_.pollHint() == PollHint::kWriteInProgress && !tasks_.hasTasks() && SteadyClock::now() < deadline) {
    if (!backoff_.yield()) break;
    poll_set_.poll();
  }
}

void EventLoop::addToPollSet(Pollable& pollable) {
  needs_arming_ = true;
  poll_set_.add(pollable);
}

bool EventLoop::releaseLock() {
  if (!poll_set_.isArmedForLeader()) {
    loop_lock_.unlock();
    return true;
  }
  loop_lock_.unlockAndFence();
  return leader_.exists();
}

// ---- threads that poll ----

void EventLoop::poll(const std::function<bool()>& done) {
  if (spin_budget_ == Duration::zero() || backoff_.isPaused() || !lockToPoll(done)) return;
  spin(done);
  armAndUnlock();
}

bool EventLoop::lockToPoll(const std::function<bool()>& done) {
  return loop_lock_.tryLockFor(spin_budget_, done, backoff_);
}

void EventLoop::spin(const std::function<bool()>& done) {
  poll_set_.disarm();
  auto last_activity = SteadyClock::now();
  const auto deadline = last_activity + kMaxSpin;
  for (bool core_is_free = true; !done() && SteadyClock::now() < deadline && !poll_set_.keepsLoopBusy();) {
    if (poll_set_.poll()) {
      last_activity = SteadyClock::now();
      core_is_free = true;
    } else if (!core_is_free) {
      break;
    } else if (SteadyClock::now() > last_activity + spin_budget_ && poll_set_.pollHint() == PollHint::kNone) {
      break;
    } else {
      core_is_free = backoff_.yield();
    }
  }
}

void EventLoop::armAndUnlock() {
  do {
    if (arm()) continue;
    needs_arming_ = true;
    tasks_.wake();
  } while (!releaseLock() && loop_lock_.fenceAndTryLock());
}

void EventLoop::park(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint deadline, bool preemptible) {
  const FutexWaiter::Claim claim(waiter);
  if (!claim || !FutexWaiter::isAvailable() || done() || !lockToPoll(done)) return;
  const auto finished = [&] { return done() || !leader_.is(waiter); };
  bool locked = true;
  for (bool leads = leader_.tryLead(waiter, preemptible); leads;) {
    const auto wait_words = poll_set_.collectWaitWords();
    if (wait_words.empty() || !arm()) break;
    locked = !releaseLock() && loop_lock_.fenceAndTryLock();
    if (locked) break;
    waiter.wait(std::ref(finished), wait_words, deadline);  // a copy in the std::function would allocate
    locked = !finished() && SteadyClock::now() < deadline && lockToPoll(done);
    if (!locked) break;
    spin(done);
    leads = !finished();
  }
  const bool replaced = !leader_.resign(waiter);
  // A replaced thread may have consumed a wake-up that its successor needs. So it arms again, which detects messages
  // that have arrived. If this thread was not replaced and another thread holds the lock, that thread arms for the loop
  // thread when it releases the lock.
  if (!locked && replaced) loop_lock_.lock();
  if (locked || replaced || loop_lock_.fenceAndTryLock()) armAndUnlock();
}

}  // namespace torchrpc::native
