// Strand: the order of tasks, one entry for many of them, tasks that block, and the end.

#include "base/executor/strand.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "base/executor/thread_pool.h"

namespace torchrpc {
namespace {

/// Held by one thread at a time, which may release it for a while: Python's GIL in miniature.
std::mutex token;
std::atomic<int> entries{0};

void enter(const std::function<void()>& run) {
  const std::lock_guard lock(token);
  ++entries;
  run();
}

}  // namespace

TEST_CASE("a strand runs tasks in the order posted, one at a time") {
  ThreadPool pool({.size = 4});
  Strand strand(pool, enter);
  std::vector<int> order;  // guarded by the token alone
  for (int i = 0; i < 1000; ++i) REQUIRE(strand.post([&order, i] { order.push_back(i); }));
  pool.close();
  REQUIRE(order.size() == 1000);
  REQUIRE(std::ranges::is_sorted(order));
}

TEST_CASE("a queue of tasks is run by one thread that enters once, and at most one more") {
  std::promise<void> all_posted;
  ThreadPool pool({.size = 4});
  Strand strand(pool, enter);
  entries = 0;
  strand.post([&, posted = all_posted.get_future().share()] { posted.wait(); });
  for (int i = 0; i < 100; ++i) strand.post([] {});
  all_posted.set_value();
  pool.close();
  REQUIRE(entries <= 2);
}

TEST_CASE("each queued task is counted once, by the strand or by the pool") {
  std::promise<void> started, go, strand_started, strand_go;
  ThreadPool pool({.size = 2, .max_size = 2});
  Strand strand(pool, {});
  const auto queued = [&] { return pool.stats().queued + strand.queued(); };
  strand.post([&] {
    strand_started.set_value();
    strand_go.get_future().wait();
  });
  strand_started.get_future().wait();
  CHECK(queued() == 0);
  pool.post([&] {
    started.set_value();
    go.get_future().wait();
  });
  started.get_future().wait();
  for (size_t i = 1; i <= 5; ++i) {
    strand.post([] {});
    CHECK(queued() == i);
  }
  go.set_value();
  strand_go.set_value();
  pool.close();
  CHECK(queued() == 0);
}

TEST_CASE("a task that releases what the strand shares does not delay the next") {
  std::promise<void> next_has_run;
  std::atomic<bool> in_time{false};
  ThreadPool pool({.size = 2});
  Strand strand(pool, enter);
  strand.post([&] {
    token.unlock();
    in_time = next_has_run.get_future().wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    token.lock();
  });
  strand.post([&] { next_has_run.set_value(); });
  pool.close();
  REQUIRE(in_time);
}

TEST_CASE("a task posted while another blocks runs meanwhile") {
  std::promise<void> blocked;
  std::promise<void> next_has_run;
  std::atomic<bool> in_time{false};
  ThreadPool pool({.size = 2});
  Strand strand(pool, enter);
  strand.post([&] {
    token.unlock();
    blocked.set_value();
    in_time = next_has_run.get_future().wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    token.lock();
  });
  blocked.get_future().wait();
  strand.post([&] { next_has_run.set_value(); });
  pool.close();
  REQUIRE(in_time);
}

TEST_CASE("tasks of a strand that block, however many, do not keep the tasks of the pool from running") {
  ThreadPool pool({.size = 2});
  Strand strand(pool, enter);
  std::atomic<bool> is_over{false};
  std::atomic<int> blocked{0};
  std::function<void()> block = [&] {
    token.unlock();
    ++blocked;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // as a function that waits for something
    token.lock();
    if (!is_over) strand.post(block);
  };
  for (int i = 0; i < 4; ++i) strand.post(block);
  while (blocked < 10) std::this_thread::yield();
  std::promise<void> has_run;
  pool.post([&] { has_run.set_value(); });
  CHECK(has_run.get_future().wait_for(std::chrono::seconds(10)) == std::future_status::ready);
  is_over = true;
  pool.close();
}

TEST_CASE("the tasks behind one that throws run") {
  std::atomic<bool> ran{false};
  ThreadPool pool({.size = 1});
  Strand strand(pool, enter);
  strand.post([] { throw std::runtime_error("a bad task"); });
  strand.post([&] { ran = true; });
  pool.close();
  REQUIRE(ran);
}

TEST_CASE("a strand without anything to enter runs tasks") {
  std::atomic<bool> ran{false};
  ThreadPool pool({.size = 1});
  Strand strand(pool, nullptr);
  strand.post([&] { ran = true; });
  pool.close();
  REQUIRE(ran);
}

TEST_CASE("after the pool has closed a strand destroys new tasks unrun") {
  ThreadPool pool({.size = 1});
  Strand strand(pool, enter);
  pool.close();
  const auto held = std::make_shared<int>(1);
  REQUIRE_FALSE(strand.post([held] { FAIL("it ran"); }));
  REQUIRE(held.use_count() == 1);
}

TEST_CASE("tasks posted to a strand from many threads each run once") {
  ThreadPool pool({.size = 4});
  Strand strand(pool, enter);
  int sum = 0;  // guarded by the token
  std::vector<std::thread> posters;
  for (int t = 0; t < 4; ++t) {
    posters.emplace_back([&] {
      for (int i = 1; i <= 1000; ++i) strand.post([&sum, i] { sum += i; });
    });
  }
  for (auto& poster : posters) poster.join();
  pool.close();
  REQUIRE(sum == 4 * 500'500);
}

}  // namespace torchrpc
