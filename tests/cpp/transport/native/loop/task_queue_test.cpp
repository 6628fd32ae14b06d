// Tasks from any thread for the loop thread.

#include "transport/native/loop/task_queue.h"

#include <catch2/catch.hpp>

#include <memory>
#include <semaphore>
#include <thread>

using namespace torchrpc::native;

TEST_CASE("posted tasks run in order, those that they post in the next round") {
  TaskQueue queue([] {});
  std::vector<int> ran;
  CHECK_FALSE(queue.hasTasks());
  queue.post([&] {
    ran.push_back(1);
    queue.post([&] { ran.push_back(3); });
  });
  queue.post([&] { ran.push_back(2); });
  CHECK(queue.hasTasks());
  queue.runPosted();
  CHECK(ran == std::vector{1, 2});
  CHECK(queue.hasTasks());
  queue.runPosted();
  CHECK(ran == std::vector{1, 2, 3});
  CHECK_FALSE(queue.hasTasks());
}

TEST_CASE("a task is destroyed before the next one runs") {
  TaskQueue queue([] {});
  auto owned = std::make_shared<int>();
  const std::weak_ptr<int> watched = owned;
  queue.post([owned = std::move(owned)] {});
  bool destroyed = false;
  queue.post([&] { destroyed = watched.expired(); });
  queue.runPosted();
  CHECK(destroyed);
}

TEST_CASE("only a loop thread that is about to block is woken for a task") {
  int wakes = 0;
  TaskQueue queue([&] { ++wakes; });
  queue.post([] {});
  CHECK(wakes == 0);
  queue.setNeedsWake(true);
  queue.post([] {});
  CHECK(wakes == 1);
  queue.setNeedsWake(false);
  queue.post([] {});
  CHECK(wakes == 1);
  queue.wake();
  CHECK(wakes == 2);
}

TEST_CASE("a stopped queue runs what it has, and then destroys tasks without running them") {
  int wakes = 0;
  bool ran = false;
  TaskQueue queue([&] { ++wakes; });
  CHECK_FALSE(queue.closeIfDrained());
  queue.post([&] { queue.post([&] { ran = true; }); });
  queue.stop();
  CHECK(wakes == 1);
  CHECK_FALSE(queue.closeIfDrained());
  queue.runPosted();
  CHECK_FALSE(queue.closeIfDrained());
  queue.runPosted();
  CHECK(ran);
  CHECK(queue.hasTasks());  // the end is something to do
  CHECK(queue.closeIfDrained());
  const auto refused = std::make_shared<int>();
  CHECK_FALSE(queue.post([refused] { FAIL("ran"); }));
  CHECK(refused.use_count() == 1);
  queue.stop();
  queue.wake();
  CHECK(wakes == 1);
}

TEST_CASE("a loop thread that blocks misses no task") {
  constexpr int kThreads = 3, kTasks = 10'000;
  std::counting_semaphore<> woken(0);
  TaskQueue queue([&] { woken.release(); });
  int ran = 0;
  std::vector<std::jthread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < kTasks; ++k) queue.post([&] { ++ran; });
    });
  }
  while (ran < kThreads * kTasks) {  // or the test hangs
    queue.runPosted();
    queue.setNeedsWake(true);
    if (!queue.hasTasks() && ran < kThreads * kTasks) woken.acquire();
    queue.setNeedsWake(false);
  }
  CHECK(ran == kThreads * kTasks);
}
