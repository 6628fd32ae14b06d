// The lane: order, entering once for many tasks, standing in for tasks that block, and the end.

#include "base/executor/strand.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

namespace torchrpc {
namespace {

/// What one thread has at a time, and may let go for a while: Python's GIL in miniature.
std::mutex token;
std::atomic<int> entries{0};

std::shared_ptr<void> enter() {
  token.lock();
  ++entries;
  return {&token, [](void*) { token.unlock(); }};
}

}  // namespace

TEST_CASE("a lane runs tasks in the order posted, one at a time") {
  ThreadPool pool({.size = 4});
  Strand lane(pool, enter);
  std::vector<int> order;  // guarded by the token alone
  for (int i = 0; i < 1000; ++i) REQUIRE(lane.post([&order, i] { order.push_back(i); }));
  pool.close();
  REQUIRE(order.size() == 1000);
  REQUIRE(std::ranges::is_sorted(order));
}

TEST_CASE("a queue of tasks is run by one thread that enters once, and another that stands by") {
  ThreadPool pool({.size = 4});
  Strand lane(pool, enter);
  entries = 0;
  std::promise<void> all_posted;
  lane.post([&, posted = all_posted.get_future().share()] { posted.wait(); });
  for (int i = 0; i < 100; ++i) lane.post([] {});
  all_posted.set_value();
  pool.close();
  REQUIRE(entries <= 2);
}

TEST_CASE("a task that lets go of what the lane needs holds up nobody") {
  ThreadPool pool({.size = 2});
  Strand lane(pool, enter);
  std::promise<void> next_has_run;
  std::atomic<bool> in_time{false};
  lane.post([&] {
    token.unlock();
    in_time = next_has_run.get_future().wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    token.lock();
  });
  lane.post([&] { next_has_run.set_value(); });
  pool.close();
  REQUIRE(in_time);
}

TEST_CASE("a task posted while another blocks is run meanwhile") {
  ThreadPool pool({.size = 2});
  Strand lane(pool, enter);
  std::promise<void> blocked;
  std::promise<void> next_has_run;
  std::atomic<bool> in_time{false};
  lane.post([&] {
    token.unlock();
    blocked.set_value();
    in_time = next_has_run.get_future().wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    token.lock();
  });
  blocked.get_future().wait();
  lane.post([&] { next_has_run.set_value(); });
  pool.close();
  REQUIRE(in_time);
}

TEST_CASE("a task that throws does not stop those behind it") {
  ThreadPool pool({.size = 1});
  Strand lane(pool, enter);
  std::atomic<bool> ran{false};
  lane.post([] { throw std::runtime_error("a bad task"); });
  lane.post([&] { ran = true; });
  pool.close();
  REQUIRE(ran);
}

TEST_CASE("a lane without anything to enter runs tasks, too") {
  ThreadPool pool({.size = 1});
  Strand lane(pool, nullptr);
  std::atomic<bool> ran{false};
  lane.post([&] { ran = true; });
  pool.close();
  REQUIRE(ran);
}

TEST_CASE("after the pool has closed a lane takes no tasks and destroys them unrun") {
  ThreadPool pool({.size = 1});
  Strand lane(pool, enter);
  pool.close();
  const auto held = std::make_shared<int>(1);
  REQUIRE_FALSE(lane.post([held] { FAIL("it ran"); }));
  REQUIRE(held.use_count() == 1);
}

TEST_CASE("tasks posted to a lane from many threads each run once") {
  ThreadPool pool({.size = 4});
  Strand lane(pool, enter);
  int sum = 0;  // guarded by the token
  std::vector<std::thread> posters;
  for (int t = 0; t < 4; ++t) {
    posters.emplace_back([&] {
      for (int i = 1; i <= 1000; ++i) lane.post([&sum, i] { sum += i; });
    });
  }
  for (auto& poster : posters) poster.join();
  pool.close();
  REQUIRE(sum == 4 * 500'500);
}

}  // namespace torchrpc
