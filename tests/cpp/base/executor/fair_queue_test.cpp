// FairQueue: its order with few and with many tasks, and how far one source delays another.

#include "base/executor/fair_queue.h"

#include <catch2/catch.hpp>

#include <future>
#include <map>
#include <random>
#include <utility>

#include "base/executor/thread_pool.h"

namespace torchrpc {
namespace {

using Numbered = std::pair<TaskSource, int>;
using NumberedQueue = FairQueue<Numbered>;

}  // namespace

TEST_CASE("a short queue is first in, first out, whatever the sources") {
  NumberedQueue queue;
  for (int i = 0; i < int{NumberedQueue::kMostInOrder}; ++i) queue.push({i % 3, i}, i % 3);
  for (int i = 0; i < int{NumberedQueue::kMostInOrder}; ++i) CHECK(queue.pop().second == i);
  CHECK(queue.empty());
}

TEST_CASE("thousands of tasks of some sources delay that of another by a few") {
  NumberedQueue queue;
  for (int i = 0; i < 5000; ++i) {
    for (const TaskSource source : {1, 2, 3}) queue.push({source, i}, source);
  }
  queue.push({4, 0}, 4);
  size_t before = 0;
  while (queue.pop().first != 4) ++before;
  CHECK(before < NumberedQueue::kMostInOrder + 4);
}

TEST_CASE("tasks of one source leave a queue in the order in which they came, and none is lost") {
  std::mt19937 random(17);
  NumberedQueue queue;
  std::map<TaskSource, int> next_in, next_out;
  size_t size = 0;
  for (int step = 0; step < 100000; ++step) {
    const bool grows = step / 5000 % 2 == 0;  // up to some thousand tasks, and down again
    if (size == 0 || random() % 10 < (grows ? 7 : 3)) {
      const auto source = static_cast<TaskSource>(random() % 5);
      queue.push({source, next_in[source]++}, source);
      ++size;
    } else {
      const auto [source, number] = queue.pop();
      REQUIRE(number == next_out[source]++);
      --size;
    }
    REQUIRE(queue.size() == size);
    REQUIRE(queue.empty() == (size == 0));
  }
  for (; size > 0; --size) {
    const auto [source, number] = queue.pop();
    REQUIRE(number == next_out[source]++);
  }
  CHECK(next_in == next_out);
}

TEST_CASE("a task that is extracted is gone, and the others stay in order") {
  NumberedQueue queue;
  for (int i = 0; i < 100; ++i) queue.push({1, i}, 1);
  queue.push({2, 1000}, 2);
  for (const int number : {0, 99, 1000, 50}) {
    Numbered out;
    REQUIRE(queue.extract([number](const Numbered& each) { return each.second == number; }, out));
    CHECK(out.second == number);
    CHECK_FALSE(queue.extract([number](const Numbered& each) { return each.second == number; }, out));
  }
  CHECK(queue.size() == 97);
  for (int i = 1; i < 99; ++i) {
    if (i != 50) REQUIRE(queue.pop().second == i);
  }
  CHECK(queue.empty());
}

TEST_CASE("a pool runs the task of another source before a long queue") {
  ThreadPool pool({.size = 1});
  std::promise<void> all_posted;
  REQUIRE(pool.post([posted = all_posted.get_future().share()] { posted.wait(); }));
  int before = -1, ran = 0;  // of the pool's one thread
  for (int i = 0; i < 10000; ++i) REQUIRE(pool.post([&ran] { ++ran; }, 1));
  REQUIRE(pool.post([&] { before = ran; }, 2));
  all_posted.set_value();
  pool.close();
  CHECK(ran == 10000);
  CHECK(before >= 0);
  CHECK(before < 100);
}

}  // namespace torchrpc
