#include "device/prefetch_limit.h"

#include <catch2/catch.hpp>

#include <atomic>
#include <thread>
#include <vector>

#include "base/sync/mutex.h"

namespace torchrpc {
namespace {

struct Requests {
  PrefetchLimit limit{100};
  std::vector<PrefetchLimit::Token> tokens;
  std::vector<int> begun;

  void enter(int number, uint64_t bytes) {
    limit.enter(bytes, [this, number](PrefetchLimit::Token token) {
      begun.push_back(number);
      tokens.push_back(std::move(token));
    });
  }
  /// The function of a request that has begun to be read begins.
  void leave(size_t index) { const auto ended = std::move(tokens.at(index)); }
};

TEST_CASE("requests are read ahead while their bytes fit, in order", "[prefetch_limit]") {
  Requests requests;
  requests.enter(1, 60);
  requests.enter(2, 40);
  requests.enter(3, 50);
  requests.enter(4, 1);  // it would fit, but is not the next
  CHECK(requests.begun == std::vector{1, 2});
  requests.leave(1);
  CHECK(requests.begun == std::vector{1, 2});
  requests.leave(0);
  CHECK(requests.begun == std::vector{1, 2, 3, 4});
}

TEST_CASE("a request of any size is read when no other one is", "[prefetch_limit]") {
  Requests requests;
  requests.enter(1, ~uint64_t{0});
  requests.enter(2, ~uint64_t{0});
  requests.enter(3, 0);
  CHECK(requests.begun == std::vector{1});
  requests.leave(0);
  CHECK(requests.begun == std::vector{1, 2});
  requests.leave(1);
  CHECK(requests.begun == std::vector{1, 2, 3});
}

TEST_CASE("a long queue of requests that end at once takes no stack", "[prefetch_limit]") {
  PrefetchLimit limit(1);
  PrefetchLimit::Token first;
  limit.enter(1, [&](PrefetchLimit::Token token) { first = std::move(token); });
  int begun = 0;
  constexpr int kMany = 1'000'000;
  for (int i = 0; i < kMany; ++i) limit.enter(1, [&](const PrefetchLimit::Token&) { ++begun; });
  CHECK(begun == 0);
  first.reset();
  CHECK(begun == kMany);
}

TEST_CASE("a request that is dropped as soon as it begins lets the next one begin", "[prefetch_limit]") {
  PrefetchLimit limit(1);
  int begun = 0;
  for (int i = 0; i < 3; ++i) {
    // The function is the last that holds the token, as when the pool has ended and drops the task.
    limit.enter(1, [&begun, token = std::make_shared<PrefetchLimit::Token>()](PrefetchLimit::Token given) {
      *token = std::move(given);
      ++begun;
    });
  }
  CHECK(begun == 3);
}

TEST_CASE("what waits is destroyed with the limit, and tokens may outlive it", "[prefetch_limit]") {
  const auto resource = std::make_shared<int>(0);
  PrefetchLimit::Token token;
  {
    PrefetchLimit limit(1);
    limit.enter(1, [&](PrefetchLimit::Token first) { token = std::move(first); });
    limit.enter(1, [resource](const PrefetchLimit::Token&) { FAIL("it began"); });
    CHECK(resource.use_count() == 2);
  }
  CHECK(resource.use_count() == 1);
  token.reset();
}

TEST_CASE("many threads enter and leave, and never more is read than may be", "[prefetch_limit]") {
  constexpr int kThreads = 4, kEach = 2000;
  std::atomic<int> reading{0}, begun{0};
  std::atomic<bool> was_exceeded{false};
  Mutex mutex;
  std::vector<PrefetchLimit::Token> tokens;
  PrefetchLimit limit(3);
  const auto leave_one = [&] {
    PrefetchLimit::Token token;
    MutexLock lock(mutex);
    if (tokens.empty()) return;
    token.swap(tokens.back());
    tokens.pop_back();
    --reading;
    lock.unlock();  // before the token ends
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < kEach; ++j) {
        limit.enter(1, [&](PrefetchLimit::Token token) {
          if (++reading > 3) was_exceeded = true;
          ++begun;
          MutexLock lock(mutex);
          tokens.push_back(std::move(token));
        });
        leave_one();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  while (begun < kThreads * kEach) leave_one();
  CHECK_FALSE(was_exceeded);
  tokens.clear();
}

}  // namespace
}  // namespace torchrpc
