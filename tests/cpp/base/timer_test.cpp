// Both timers: tasks that are due run once, in order; tasks that are cancelled, or pending at close(), do not.

#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <latch>
#include <random>
#include <thread>
#include <vector>

#include "testing/manual_timer.h"

namespace torchrpc {

using namespace std::chrono_literals;

TEST_CASE("a manual timer's tasks run when time is advanced to them, in order of their time") {
  ManualTimer timer;
  std::vector<int> ran;
  timer.after(3s, [&] { ran.push_back(3); });
  timer.after(1s, [&] { ran.push_back(1); });
  timer.after(2s, [&] { ran.push_back(2); });
  timer.after(2s, [&] { ran.push_back(20); });
  CHECK(timer.pending() == 4);

  timer.advance(999ms);
  CHECK(ran.empty());
  timer.advance(1001ms);
  CHECK(ran == std::vector{1, 2, 20});
  timer.advance(1s);
  CHECK(ran == std::vector{1, 2, 20, 3});
  CHECK(timer.pending() == 0);
}

TEST_CASE("a manual timer's clock stands at each task's time while it runs, and its tasks may add tasks") {
  ManualTimer timer;
  const auto start = timer.now();
  std::vector<Duration> at;
  timer.after(1s, [&] {
    at.push_back(timer.now() - start);
    timer.after(1s, [&] { at.push_back(timer.now() - start); });
    timer.at(start, [&] { at.push_back(timer.now() - start); });
  });
  timer.advance(5s);
  CHECK(at == std::vector<Duration>{1s, 1s, 2s});
  CHECK(timer.now() - start == 5s);
}

TEST_CASE("a cancelled task does not run, and only the cancellation of a pending one returns true") {
  ManualTimer timer;
  int ran = 0;
  const auto first = timer.after(1s, [&] { ++ran; });
  const auto second = timer.after(1s, [&] { ++ran; });
  CHECK(timer.cancel(first));
  CHECK_FALSE(timer.cancel(first));
  timer.advance(1s);
  CHECK(ran == 1);
  CHECK_FALSE(timer.cancel(second));
  CHECK_FALSE(timer.cancel(12345));
}

TEST_CASE("after any mixture of at() and cancel() the tasks that are left run, in order") {
  const auto seed = GENERATE(1u, 2u, 3u);
  INFO("seed " << seed);
  std::mt19937 random(seed);
  ManualTimer timer;
  std::vector<std::pair<Timer::Id, int>> pending;
  std::vector<int> ran;
  for (int i = 0; i < 5000; ++i) {
    const int when = static_cast<int>(random() % 1000);
    pending.emplace_back(timer.after(when * 1s, [&ran, when] { ran.push_back(when); }), when);
    if (random() % 8 != 0) {
      const size_t which = random() % pending.size();
      REQUIRE(timer.cancel(pending[which].first));
      pending.erase(pending.begin() + static_cast<long>(which));
    }
  }
  REQUIRE(timer.pending() == pending.size());
  timer.advance(1000s);
  std::vector<int> expected;
  for (const auto& [id, when] : pending) expected.push_back(when);
  std::sort(expected.begin(), expected.end());
  CHECK(ran == expected);
}

TEST_CASE("a task at kNever does not run, nor does one whose delay is too long for the clock") {
  ManualTimer timer;
  timer.advance(1h);
  int ran = 0;
  timer.at(kNever, [&] { ++ran; });
  timer.after(kNoLimit, [&] { ++ran; });
  timer.advance(24h * 365 * 100);
  CHECK(ran == 0);
  CHECK(timer.pending() == 2);
}

TEST_CASE("deadlines without a limit, and those that the clock cannot count, are kNever") {
  const auto start = TimePoint() + 1h;
  CHECK(deadlineAfter(5s, start) == start + 5s);
  CHECK(deadlineAfter(-5s, start) == start - 5s);
  CHECK(deadlineAfter(kNoLimit, start) == kNever);
  CHECK(deadlineAfter(kNoLimit - 1s, start) == kNever);
  CHECK(deadlineAfter(kNoLimit) == kNever);
}

TEST_CASE("zero, and more than a century, are no limit where users give seconds") {
  CHECK(noLimitIfZero(0s) == kNoLimit);
  CHECK(noLimitIfZero(1s) == 1s);
  CHECK(durationFromSeconds(0.25) == 250ms);
  CHECK(durationFromSeconds(1e-12) == Duration(1));
  CHECK(durationFromSeconds(1e12) == kNoLimit);
}

TEST_CASE("a closed timer drops its tasks and accepts no more") {
  const auto manual = GENERATE(true, false);
  std::unique_ptr<Timer> timer = manual ? std::make_unique<ManualTimer>() : makeThreadTimer();
  auto kept = std::make_shared<int>(0);
  timer->after(1h, [kept] { ++*kept; });
  timer->close();
  CHECK(timer->at(timer->now(), [kept] { ++*kept; }) == 0);
  CHECK(kept.use_count() == 1);
  timer->close();
  CHECK(*kept == 0);
}

TEST_CASE("a thread timer runs its tasks on a thread of its own, in order of their time") {
  auto timer = makeThreadTimer();
  std::vector<int> ran;
  std::thread::id thread;
  std::latch added(1), done(1);
  const auto now = timer->now();
  timer->at(now, [&] { added.wait(); });  // nothing runs before all tasks have been added
  timer->at(now + 30ms, [&] {
    ran.push_back(3);
    thread = std::this_thread::get_id();
    done.count_down();
  });
  timer->at(now + 20ms, [&] { ran.push_back(2); });
  timer->at(now + 10ms, [&] { ran.push_back(1); });
  added.count_down();
  done.wait();
  CHECK(thread != std::this_thread::get_id());
  CHECK(timer->now() >= now + 30ms);
  CHECK(ran == std::vector{1, 2, 3});
}

TEST_CASE("a thread timer that sleeps towards a late task wakes for an earlier one") {
  auto timer = makeThreadTimer();
  timer->at(kNever, [] {});
  timer->after(1h, [] {});
  std::latch done(1);
  timer->after(1ms, [&] { done.count_down(); });
  done.wait();
}

TEST_CASE("a thread timer's close waits for the task under way") {
  auto timer = makeThreadTimer();
  std::latch running(1);
  std::atomic<bool> finished = false;
  std::latch go(1);
  timer->at(timer->now(), [&] {
    running.count_down();
    go.wait();
    finished = true;
  });
  running.wait();
  std::thread closer([&] {
    timer->close();
    CHECK(finished);
  });
  go.count_down();
  closer.join();
}

TEST_CASE("a thread timer can be closed by one of its tasks") {
  auto timer = makeThreadTimer();
  std::latch closed(1);
  timer->at(timer->now(), [&] {
    timer->close();
    closed.count_down();
  });
  closed.wait();
  CHECK(timer->after(0s, [] {}) == 0);
}

TEST_CASE("a task that was cancelled does not run, also in a race with the thread timer") {
  auto timer = makeThreadTimer();
  for (int i = 0; i < 2000; ++i) {
    auto ran = std::make_shared<std::atomic<bool>>(false);
    const auto id = timer->after(std::chrono::microseconds(i % 50), [ran] { *ran = true; });
    const bool cancelled = timer->cancel(id);
    if (!cancelled) {
      while (!*ran) std::this_thread::yield();
    } else {
      REQUIRE_FALSE(*ran);
    }
  }
}

}  // namespace torchrpc
