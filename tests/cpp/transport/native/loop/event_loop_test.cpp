// The parts of the event loop together: tasks, threads that poll, the leader.

#include "transport/native/loop/event_loop.h"

#include <catch2/catch.hpp>

#include <atomic>
#include <memory>
#include <thread>

#include "needs_futex_waiter.h"
#include "outcomes.h"
#include "transport/native/loop/fake_pollable.h"

using namespace torchrpc;
using namespace torchrpc::native;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

/// An event loop with one pollable, to which messages can be sent as a peer does.
struct LoopWithPollable {
  explicit LoopWithPollable(Duration spin_budget = 100us) : owned(std::make_unique<EventLoop>(spin_budget)) {
    addToPollSet();
  }
  ~LoopWithPollable() { loop.stop(); }

  void addToPollSet() {
    onLoop([&] {
      loop.lock().assertHeld();
      loop.addToPollSet(pollable);
    });
  }
  void onLoop(const std::function<void()>& task) {
    std::atomic<bool> done{false};
    REQUIRE(loop.post([&] {
      task();
      done = true;
      done.notify_one();
    }));
    done.wait(false);
  }
  /// The thread that a peer would wake now.
  std::optional<WakeTarget> armed() {
    std::optional<WakeTarget> target;
    onLoop([&] {
      loop.lock().assertHeld();
      target = pollable.armed;
      loop.addToPollSet(pollable);  // also if it has been idle for some rounds
    });
    return target;
  }
  void send() {
    pollable.has_message = true;
    if (pollable.word->exchange(0) == FakePollable::kParked) return FutexWaiter::wake(*pollable.word);
    onLoop([&] {
      loop.lock().assertHeld();
      loop.addToPollSet(pollable);
      pollable.poll();
    });
  }

  FakePollable pollable;
  // On the heap: ThreadSanitizer would take the mutexes of the next test, at the same addresses of the stack, for
  // these.
  const std::unique_ptr<EventLoop> owned;
  EventLoop& loop = *owned;
};

}  // namespace

TEST_CASE("tasks and timers run on the loop thread") {
  std::atomic<bool> task_in_loop{false}, timer_in_loop{false};
  EventLoop::Watch timer;
  const auto owned = std::make_unique<EventLoop>(100us);  // on the heap, as above
  auto& loop = *owned;
  CHECK_FALSE(loop.inLoop());
  REQUIRE(loop.post([&] {
    task_in_loop = loop.inLoop();
    timer = loop.after(1ms, [&] {
      timer = {};
      timer_in_loop = loop.inLoop();
    });
  }));
  CHECK(eventually([&] { return task_in_loop && timer_in_loop; }));
}

TEST_CASE("an event loop that stops runs all tasks, also those that they post, and then takes no more") {
  std::atomic<int> ran{0};
  const auto owned = std::make_unique<EventLoop>(100us);  // on the heap, as above
  auto& loop = *owned;
  for (int i = 0; i < 100; ++i) {
    REQUIRE(loop.post([&] { loop.post([&] { ++ran; }); }));
  }
  loop.stop();
  CHECK(ran == 100);
  CHECK_FALSE(loop.post([&] { ++ran; }));
  loop.stop();
  CHECK(ran == 100);
}

TEST_CASE("a thread that waits polls by itself") {
  std::atomic<bool> polled{false};
  LoopWithPollable loop;
  loop.onLoop([&] {
    loop.pollable.on_poll = [&, loop_thread = std::this_thread::get_id()] {
      if (std::this_thread::get_id() != loop_thread) polled = true;
    };
  });
  CHECK(eventually([&] {
    loop.addToPollSet();
    loop.loop.poll([&] { return polled.load(); });
    return polled.load();
  }));
}

TEST_CASE("without a spin budget no thread polls") {
  LoopWithPollable loop(Duration::zero());
  int asked = 0;
  loop.loop.poll([&] { return ++asked > 0; });
  CHECK(asked == 0);
}

TEST_CASE("a message wakes the thread that is parked as the leader") {
  NEEDS_FUTEX_WAITER;
  std::atomic<bool> received{false};
  LoopWithPollable loop;
  loop.onLoop([&] { loop.pollable.on_poll = [&] { received = received || loop.pollable.has_message; }; });
  std::jthread leader([&] {
    FutexWaiter waiter;
    // A leader that does not get the loop lock when it is woken leaves the message to the loop thread.
    while (!received) loop.loop.park([&] { return received.load(); }, waiter, kNever, /*preemptible=*/false);
  });
  REQUIRE(eventually([&] { return loop.armed() == WakeTarget::kLeader; }));
  loop.send();
  leader.join();  // or the test hangs
  CHECK(received);
  CHECK(eventually([&] { return loop.armed() == WakeTarget::kLoop; }));
}

TEST_CASE("a parked leader returns at its deadline, and peers wake the loop thread from then on") {
  NEEDS_FUTEX_WAITER;
  LoopWithPollable loop;
  FutexWaiter waiter;
  const auto deadline = deadlineAfter(20ms);
  // It returns early if another thread has the loop lock.
  while (std::chrono::steady_clock::now() < deadline) {
    loop.loop.park([] { return false; }, waiter, deadline, /*preemptible=*/false);
  }
  CHECK(eventually([&] { return loop.armed() == WakeTarget::kLoop; }));
}

TEST_CASE("a second thread with the same waiter returns at once, and the parked one stays parked and is woken") {
  NEEDS_FUTEX_WAITER;
  std::atomic<bool> done{false};
  FutexWaiter waiter;
  LoopWithPollable loop;
  const auto park = [&] { loop.loop.park([&] { return done.load(); }, waiter, kNever, /*preemptible=*/false); };
  std::jthread parked([&] {
    while (!done) park();
  });
  REQUIRE(eventually([&] { return loop.armed() == WakeTarget::kLeader; }));
  for (int i = 0; i < 100; ++i) park();  // or the test hangs
  CHECK(eventually([&] { return loop.armed() == WakeTarget::kLeader; }));
  done = true;
  waiter.notify();
  parked.join();  // or the test hangs
}

TEST_CASE("a thread that waits replaces a preemptible leader, which then finds no room as the leader") {
  NEEDS_FUTEX_WAITER;
  std::atomic<bool> done{false};
  std::atomic<int> idle_returns{0};
  FutexWaiter idle_waiter, caller_waiter;
  LoopWithPollable loop;
  const auto park = [&](FutexWaiter& waiter, bool preemptible) {
    loop.loop.park([&] { return done.load(); }, waiter, kNever, preemptible);
    std::this_thread::sleep_for(100us);  // the other thread may lead meanwhile
  };
  std::jthread idle([&] {
    for (; !done; ++idle_returns) park(idle_waiter, /*preemptible=*/true);
  });
  REQUIRE(eventually([&] { return loop.armed() == WakeTarget::kLeader; }));
  const int before = idle_returns;
  std::jthread caller([&] {
    while (!done) park(caller_waiter, /*preemptible=*/false);
  });
  CHECK(eventually([&] { return idle_returns > before + 10 && loop.armed() == WakeTarget::kLeader; }));
  done = true;
  idle_waiter.notify();
  caller_waiter.notify();
}
