#include "transport/native/loop/event_loop.h"

#include <chrono>
#include <utility>

#include "base/executor/scheduling.h"
#include "base/executor/start_thread.h"
#include "base/os/threads.h"

namespace torchrpc::native {

namespace {

constexpr size_t kScratchBytes = 64 << 10;

// Note [Busy polling]
// A thread that polls for a message saves the system calls and the 5 to 50 µs that a wake-up takes. So a thread that is
// about to wait for a message, or for a task that a message may bring, polls first: it takes the loop lock, polls the
// connections that have been active, and receives its message without the help of another thread. Only the loop thread
// may use libuv; a polling thread posts a task for that. The loop thread itself blocks as soon as it can: it would
// compete with the polling threads. It polls only if a peer has sent a wake-up ahead of time, while copying something
// large, and is about to be done.
// A polling thread yields between two polls, so that a runnable thread goes first. If a yield took longer than
// kLongYield and the next poll finds nothing, the thread stops polling: other threads need the cores, and a thread that
// sleeps is scheduled sooner than one that yields. If a yield took a time slice, no thread begins to poll for
// kFirstPauseYields times as long: the machine has more runnable threads than cores. This may have been an exception;
// but a pause that is needed again within its own length after its end is doubled, up to kMaxPauseYields times the
// yield. These constants are in spin_backoff.cpp.
// A polling thread releases the loop lock after kMaxSpin even if messages keep coming, and no thread begins to poll
// while the loop thread waits for the lock (LoopLock). A thread that releases the lock has armed all pollables before:
// then the peer sends a wake-up with its next message, and the loop thread wakes up for it.
// The loop thread takes the lock only for rings and frames. It handles unauthenticated sockets without the lock, so
// peers that connect do not disturb threads that poll.
//
// Note [Leader/Followers]
// A thread that has polled without result parks. If the loop thread received the thread's message, and woke the thread
// then, the message would cost two wake-ups where one is enough. So one of the threads, the leader, parks on the wait
// words of the rings themselves (futexes in their shared memory) and on a FutexWaiter, which threads of its own process
// notify. The loop thread stays blocked, because no peer wakes it. The followers sleep elsewhere.
// The leader does not have the loop lock while it is parked, so that the loop thread and other threads go on; it takes
// the lock when it is woken. Sockets, and rings on which the leader is not parked, are the loop thread's.
// The leader may leave while another thread has the lock, and that thread has perhaps just armed the rings for the
// leader. So each thread that releases the lock checks afterwards whether the leader for which it armed is still there;
// if not, it arms again: Note [Unlock, then look] in loop_lock.h. A thread of the pool that has nothing to do is
// preemptible: a thread that waits for a reply replaces it as the leader.
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
  // A burst of messages wakes the loop thread once for every few of them. Without the policy it would preempt the
  // thread that sends them each time.
  Scheduling().applyBatchPolicy();
  lockLoop();
  for (;;) {
    tasks_.runPosted();
    if (tasks_.closeIfDrained()) break;
    if (needs_arming_) pollForWrites();
    const bool quiet = !needs_arming_ || armOrPoll();
    tasks_.setNeedsWake(quiet);
    // Only after setNeedsWake(): a thread that posts later wakes the loop thread.
    const bool may_block = quiet && !tasks_.hasTasks() && unlockLoop();
    // Without the lock, runOnce() is repeated until a callback has taken it.
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
  if (!FutexWaiter::isAvailable() || done() || !lockToPoll(done)) return;
  const auto finished = [&] { return done() || !leader_.is(waiter); };
  bool locked = true;
  for (bool leads = leader_.tryLead(waiter, preemptible); leads;) {
    const auto wait_words = poll_set_.collectWaitWords();
    if (wait_words.empty() || !arm()) break;
    locked = !releaseLock() && loop_lock_.fenceAndTryLock();
    if (locked) break;
    waiter.wait(finished, wait_words, deadline);
    locked = !finished() && SteadyClock::now() < deadline && lockToPoll(done);
    if (!locked) break;
    spin(done);
    leads = !finished();
  }
  const bool replaced = !leader_.resign(waiter);
  // A replaced thread may have consumed a wake-up that its successor needs: it arms again, which shows what has come.
  // If this thread was not replaced, and another has the lock, that one arms for the loop thread when it releases the
  // lock.
  if (!locked && replaced) loop_lock_.lock();
  if (locked || replaced || loop_lock_.fenceAndTryLock()) armAndUnlock();
}

}  // namespace torchrpc::native
