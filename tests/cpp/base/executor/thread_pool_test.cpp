// The pool: order, growth under blocking, its limits, and its end.

#include "base/executor/thread_pool.h"

#include <catch2/catch.hpp>

#include <atomic>
#include <iostream>
#include <latch>
#include <pthread.h>
#include <sched.h>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "needs_futex_waiter.h"
#include "outcomes.h"

namespace torchrpc {

using test::eventually;

namespace {

// Blocks, as a nested call does, until a task has run that blocks likewise, and so on.
void nest(ThreadPool& pool, int depth, std::atomic<int>& reached) {
  ++reached;
  if (depth == 0) return;
  std::latch done(1);
  pool.post([&] {
    nest(pool, depth - 1, reached);
    done.count_down();
  });
  ThreadPool::BlockingScope blocking;
  done.wait();
}

/// What is written to std::cerr while it exists, as the log is.
class CapturedLog {
 public:
  CapturedLog() : outer_(std::cerr.rdbuf(text_.rdbuf())) {}
  ~CapturedLog() { std::cerr.rdbuf(outer_); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  std::streambuf* const outer_;
};

std::string threadName() {
  char name[16];
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

}  // namespace

TEST_CASE("a pool starts with one thread, which does not poll before there has been a task") {
  std::latch done(1);
  std::atomic<int> polls = 0;
  ThreadPool pool({.poll_before_park = [&](const std::function<bool()>&) { ++polls; }});
  CHECK(pool.stats().threads == 1);
  while (pool.stats().idle == 0) std::this_thread::yield();
  CHECK(polls == 0);
  std::string name;
  REQUIRE(pool.post([&] {
    name = threadName();
    done.count_down();
  }));
  done.wait();
  CHECK(name == "torchrpc-0");
  CHECK(pool.stats().threads == 1);
}

TEST_CASE("a thread's name keeps its number when the pool's is long") {
  ThreadPool pool({.size = 1, .name = "a-very-long-name-indeed"});
  std::string name;
  pool.post([&] { name = threadName(); });
  pool.close();
  CHECK(name == "a-very-long-n-0");
}

TEST_CASE("threads have the scheduling policy of the thread that made the pool, not of those that start them") {
  const int usual = sched_getscheduler(0);
  REQUIRE(usual != SCHED_BATCH);
  std::atomic<int> policy = -1;
  ThreadPool pool({.size = 1, .name = "pool"});
  int starters = -1;
  std::thread([&] {
    const sched_param parameters{};
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &parameters);
    starters = sched_getscheduler(0);
    pool.post([&] { policy = sched_getscheduler(0); });
  }).join();
  pool.close();
  CHECK(starters == SCHED_BATCH);
  CHECK(policy == usual);
}

TEST_CASE("an idle thread is used before a new one is started") {
  ThreadPool pool({.size = 4});
  for (int i = 0; i < 200; ++i) {
    std::latch done(1);
    pool.post([&] { done.count_down(); });
    done.wait();
    while (pool.stats().idle == 0) std::this_thread::yield();
  }
  CHECK(pool.stats().threads == 1);
}

TEST_CASE("tasks start in the order posted") {
  ThreadPool pool({.size = 1});
  std::vector<int> ran;
  for (int i = 0; i < 1000; ++i) pool.post([&, i] { ran.push_back(i); });
  pool.close();
  REQUIRE(ran.size() == 1000);
  CHECK(std::is_sorted(ran.begin(), ran.end()));
}

TEST_CASE("as many tasks run at once as the pool's size, and no more") {
  std::latch all(4);
  std::atomic<int> running = 0;
  std::atomic<int> most = 0;
  ThreadPool pool({.size = 4});
  for (int i = 0; i < 4; ++i) pool.post([&] { all.arrive_and_wait(); });
  for (int i = 0; i < 500; ++i) {
    pool.post([&] {
      const int now = ++running;
      int seen = most;
      while (seen < now && !most.compare_exchange_weak(seen, now)) {
      }
      std::this_thread::yield();
      --running;
    });
  }
  pool.close();
  CHECK(most <= 4);
}

TEST_CASE("a burst of short tasks starts no more threads than the pool's size") {
  ThreadPool pool({.size = 3});
  for (int i = 0; i < 10000; ++i) pool.post([] {});
  CHECK(pool.stats().threads <= 3);
}

TEST_CASE("calls that block on each other 64 deep end on a pool of four") {
  std::atomic<int> reached = 0;
  std::latch done(1);
  ThreadPool pool({.size = 4});
  pool.post([&] {
    nest(pool, 64, reached);
    done.count_down();
  });
  done.wait();
  CHECK(reached == 65);
}

TEST_CASE("many nested calls side by side end on a pool of one, and leave one thread") {
  std::atomic<int> reached = 0;
  std::latch done(20);
  ThreadPool pool({.size = 1});
  for (int i = 0; i < 20; ++i) {
    pool.post([&] {
      nest(pool, 10, reached);
      done.count_down();
    });
  }
  done.wait();
  CHECK(reached == 20 * 11);
  while (pool.stats().threads > 1) std::this_thread::yield();
}

TEST_CASE("blocked threads are counted, once however deep their scopes") {
  std::latch inside(1);
  std::latch go(1);
  ThreadPool pool({.size = 2});
  pool.post([&] {
    ThreadPool::BlockingScope outer;
    ThreadPool::BlockingScope inner;
    inside.count_down();
    go.wait();
  });
  inside.wait();
  CHECK(pool.stats().blocked == 1);
  go.count_down();
  while (pool.stats().blocked != 0) std::this_thread::yield();
}

TEST_CASE("a blocking scope on a thread of no pool does nothing") {
  ThreadPool::BlockingScope blocking;
  SUCCEED();
}

TEST_CASE("a pool at its maximum size does not replace a blocked thread, and goes on when that does") {
  std::latch inside(2);
  std::latch go(1);
  std::latch ran(1);
  const auto begin = std::chrono::steady_clock::now();
  ThreadPool pool({.size = 2, .max_size = 2});
  CHECK(pool.stats().at_limit < begin);
  for (int i = 0; i < 2; ++i) {
    pool.post([&] {
      ThreadPool::BlockingScope blocking;
      inside.count_down();
      go.wait();
    });
  }
  inside.wait();
  CHECK(pool.stats().lacking == 0);
  pool.post([&] { ran.count_down(); });
  CHECK(pool.stats().threads == 2);
  CHECK(pool.stats().queued == 1);
  CHECK(pool.stats().lacking == 1);
  CHECK(pool.stats().at_limit >= begin);
  go.count_down();
  ran.wait();
  CHECK(pool.stats().lacking == 0);
}

TEST_CASE("a pool remembers when it last had its maximum of threads") {
  const auto begin = std::chrono::steady_clock::now();
  std::latch inside(2);
  std::latch go(1);
  ThreadPool pool({.size = 1, .max_size = 2});
  for (int i = 0; i < 2; ++i) {
    pool.post([&] {
      ThreadPool::BlockingScope blocking;
      inside.count_down();
      go.wait();
    });
  }
  inside.wait();
  go.count_down();
  while (pool.stats().threads > 1) std::this_thread::yield();
  const auto at_limit = pool.stats().at_limit;
  CHECK(at_limit >= begin);
  CHECK(pool.stats().at_limit == at_limit);
}

TEST_CASE("tasks that wait for running ones lack no thread") {
  std::latch inside(2);
  std::latch go(1);
  ThreadPool pool({.size = 2, .max_size = 2});
  for (int i = 0; i < 2; ++i) {
    pool.post([&] {
      inside.count_down();
      go.wait();
    });
  }
  inside.wait();
  pool.post([] {});
  CHECK(pool.stats().queued == 1);
  CHECK(pool.stats().lacking == 0);
  go.count_down();
}

TEST_CASE("a pool logs once that it has reached its maximum size") {
  std::latch inside(1);
  std::latch go(1);
  const CapturedLog log;
  {
    ThreadPool pool({.size = 2, .max_size = 1, .name = "small"});
    pool.post([&] {
      ThreadPool::BlockingScope blocking;
      inside.count_down();
      go.wait();
    });
    inside.wait();
    for (int i = 0; i < 3; ++i) pool.post([] {});
    go.count_down();
  }
  const auto text = log.text();
  const auto first = text.find("thread pool small has its largest number of threads, 1, of which 1 are blocked");
  CHECK(first != std::string::npos);
  CHECK(text.find("largest number of threads", first + 100) == std::string::npos);
}

TEST_CASE("tasks run after one that has thrown") {
  std::latch next(1);
  ThreadPool pool({.size = 1});
  pool.post([] { throw std::runtime_error("expected in this test's output"); });
  pool.post([] { throw 1; });
  pool.post([&] { next.count_down(); });
  next.wait();
}

TEST_CASE("one thread polls before it sleeps, and runs the task that it finds itself") {
  std::unique_ptr<ThreadPool> pool;
  std::atomic<int> polling = 0, found = 0;
  std::latch ran(3);
  pool = std::make_unique<ThreadPool>(ThreadPool::Options{.poll_before_park = [&](const std::function<bool()>& done) {
    CHECK(++polling == 1);
    if (!done() && found < 2) {
      ++found;
      pool->post([&, finder = std::this_thread::get_id()] {
        CHECK(std::this_thread::get_id() == finder);
        ran.count_down();
      });
      CHECK(done());
    }
    --polling;
  }});
  pool->post([&] { ran.count_down(); });
  ran.wait();
  pool->close();
  CHECK(found == 2);
}

TEST_CASE("a task that another thread posts ends the polling") {
  std::latch ran(1);
  std::atomic<bool> polls = false;
  std::atomic<bool> first = true;
  ThreadPool pool({.poll_before_park = [&](const std::function<bool()>& done) {
    polls = true;
    polls.notify_all();
    while (!done()) std::this_thread::yield();
  }});
  pool.post([&] { first = false; });
  polls.wait(false);
  CHECK_FALSE(first);
  pool.post([&] { ran.count_down(); });
  ran.wait();
}

TEST_CASE("a thread that has polled without result parks where tasks arrive, and post() and close() wake it") {
  NEEDS_FUTEX_WAITER;
  std::atomic<int> parked = 0, ran = 0;
  std::latch both(2);
  ThreadPool pool(
      {.poll_before_park = [](const std::function<bool()>&) {},
       .park =
           [&](const std::function<bool()>& done, FutexWaiter& waiter) {
             ++parked;
             while (!done()) waiter.wait(done, {}, kNever);
           }});
  for (int i = 1; i <= 2; ++i) {
    pool.post([&] {
      ++ran;
      both.count_down();
    });
    CHECK(eventually([&] { return parked == i; }));
    CHECK(ran == i);
  }
  both.wait();
  CHECK(pool.stats().idle == 1);
  pool.close();
}

namespace {
int policyHere() {
  sched_param parameters{};
  int policy = -1;
  ::pthread_getschedparam(::pthread_self(), &policy, &parameters);
  return policy;
}
}  // namespace

TEST_CASE("threads are scheduled as SCHED_BATCH while they sleep, not while they run tasks") {
  NEEDS_FUTEX_WAITER;
  std::atomic<int> asleep = -1;
  ThreadPool pool(
      {.poll_before_park = [](const std::function<bool()>&) {},
       .park =
           [&](const std::function<bool()>& done, FutexWaiter& waiter) {
             asleep = policyHere();
             while (!done()) waiter.wait(done, {}, kNever);
           }});
  for (int i = 0; i < 2; ++i) {
    std::latch ran(1);
    int running = -1;
    pool.post([&] {
      running = policyHere();
      ran.count_down();
    });
    ran.wait();
    CHECK(running == policyHere());
    CHECK(eventually([&] { return asleep == SCHED_BATCH; }));
    asleep = -1;
  }
}

TEST_CASE("close runs the queued tasks, and no task is accepted after it") {
  std::atomic<int> ran = 0;
  ThreadPool pool({.size = 2});
  for (int i = 0; i < 1000; ++i) pool.post([&] { ++ran; });
  pool.close();
  CHECK(ran == 1000);
  CHECK(pool.stats().threads == 0);

  auto kept = std::make_shared<int>();
  CHECK_FALSE(pool.post([kept] {}));
  CHECK(kept.use_count() == 1);
  pool.close();
}

TEST_CASE("close runs queued tasks that block on each other's queue positions") {
  std::latch go(1);
  std::atomic<bool> ended = false;
  ThreadPool pool({.size = 1});
  pool.post([&] {
    ThreadPool::BlockingScope blocking;
    go.wait();
    ended = true;
  });
  pool.post([&] { go.count_down(); });
  pool.close();
  CHECK(ended);
}

TEST_CASE("close from two threads waits in both") {
  std::latch go(1);
  std::atomic<bool> ended = false;
  ThreadPool pool({.size = 2});
  pool.post([&] {
    go.wait();
    ended = true;
  });
  std::vector<std::thread> closers;
  for (int i = 0; i < 2; ++i) {
    closers.emplace_back([&] {
      pool.close();
      if (!ended) std::terminate();
    });
  }
  go.count_down();
  for (auto& closer : closers) closer.join();
}

TEST_CASE("close on a thread of the pool throws instead of waiting for itself") {
  std::latch caught(1);
  ThreadPool pool({.size = 1, .name = "mine"});
  std::string text;
  pool.post([&] {
    try {
      pool.close();
    } catch (const std::exception& error) {
      text = error.what();
      caught.count_down();
    }
  });
  caught.wait();
  CHECK(text == "thread pool mine closed by one of its threads");
}

TEST_CASE("a task may close its pool without waiting, and the threads end after it") {
  std::latch closed(1), release(1);
  ThreadPool pool({.size = 2});
  bool has_ended = true;
  pool.post([&] {
    has_ended = pool.close(Duration::zero());
    closed.count_down();
    release.wait();
  });
  closed.wait();
  CHECK_FALSE(has_ended);
  CHECK_FALSE(pool.close(Duration::zero()));
  release.count_down();
  CHECK(pool.close(std::chrono::seconds(20)));
}

TEST_CASE("posting from many threads loses nothing") {
  std::atomic<int> ran = 0;
  ThreadPool pool({.size = 3});
  std::vector<std::thread> posters;
  for (int i = 0; i < 4; ++i) {
    posters.emplace_back([&] {
      for (int j = 0; j < 5000; ++j) {
        pool.post([&ran, j] {
          if (j % 50 == 0) {
            ThreadPool::BlockingScope blocking;
            std::this_thread::yield();
          }
          ++ran;
        });
      }
    });
  }
  for (auto& poster : posters) poster.join();
  pool.close();
  CHECK(ran == 20000);
}

}  // namespace torchrpc
