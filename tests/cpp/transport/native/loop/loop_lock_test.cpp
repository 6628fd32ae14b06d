// The loop lock, and the priority of the loop thread.

#include "transport/native/loop/loop_lock.h"

#include <catch2/catch.hpp>

#include <atomic>
#include <barrier>
#include <fstream>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "outcomes.h"

using namespace torchrpc;
using namespace torchrpc::native;
using namespace torchrpc::test;
using namespace std::chrono_literals;

TEST_CASE("a thread that wants to poll does not wait for the loop lock for long") {
  LoopLock lock;
  SpinBackoff backoff;
  lock.lock();
  bool locked = true;
  std::jthread([&] { locked = lock.try_lock(); }).join();
  CHECK_FALSE(locked);
  std::jthread([&] { locked = lock.tryLockFor(1ms, [] { return false; }, backoff); }).join();
  CHECK_FALSE(locked);
  std::jthread([&] { locked = lock.tryLockFor(24h, [] { return true; }, backoff); }).join();
  CHECK_FALSE(locked);
  lock.unlock();
  std::jthread([&] {
    if (!lock.tryLockFor(1ms, [] { return false; }, backoff)) return;
    locked = true;
    lock.unlock();
  }).join();
  CHECK(locked);
}

TEST_CASE("of a thread that unlocks and one that leaves, at least one sees the other") {
  for (int i = 0; i < 2'000; ++i) {
    LoopLock lock;
    std::atomic<bool> left{false};
    bool sees_left = false, sees_free = false;
    std::barrier start(2);
    lock.lock();
    std::jthread leaves([&] {
      start.arrive_and_wait();
      left = true;
      if (!lock.fenceAndTryLock()) return;
      sees_free = true;
      lock.unlock();
    });
    start.arrive_and_wait();
    lock.unlockAndFence();
    sees_left = left;
    leaves.join();
    REQUIRE((sees_left || sees_free));
  }
}

TEST_CASE("threads that keep polling do not keep the loop thread from the loop lock") {
  LoopLock lock;
  SpinBackoff backoff;
  std::atomic<bool> stopped{false};
  int holders = 0;
  bool shared = false;
  const auto hold = [&] {
    shared = shared || ++holders != 1;
    const auto end = deadlineAfter(20us);
    while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
    --holders;
  };
  std::vector<std::jthread> pollers;
  for (int i = 0; i < 2; ++i) {
    pollers.emplace_back([&] {
      while (!stopped) {
        if (!lock.tryLockFor(100us, [&] { return stopped.load(); }, backoff)) continue;
        hold();
        lock.unlock();
      }
    });
  }
  for (int i = 0; i < 1'000; ++i) {  // or the test hangs
    lock.lockFromLoopThread();
    hold();
    lock.unlock();
  }
  stopped = true;
  pollers.clear();
  CHECK_FALSE(shared);
}

TEST_CASE("while the loop thread waits for the loop lock, a thread that polls does not overtake it") {
  for (int i = 0; i < 20; ++i) {
    LoopLock lock;
    std::atomic<pid_t> thread{0};
    bool is_served = false, is_overtaken = false;
    lock.lock();
    std::jthread loop([&] {
      thread = ::gettid();
      lock.lockFromLoopThread();
      is_served = true;
      lock.unlock();
    });
    const auto sleeps = [&] {  // in the line: number, (name), state
      std::ifstream stat("/proc/self/task/" + std::to_string(thread) + "/stat");
      std::string line;
      std::getline(stat, line);
      return line.find(") S ") != std::string::npos;
    };
    REQUIRE(eventually(sleeps));
    std::jthread poller([&] {
      SpinBackoff backoff;
      if (!lock.tryLockFor(20s, [] { return false; }, backoff)) return;
      is_overtaken = !is_served;
      lock.unlock();
    });
    std::this_thread::sleep_for(1ms);  // for the other thread to poll
    lock.unlock();
    loop.join();
    poller.join();
    REQUIRE_FALSE(is_overtaken);
  }
}
