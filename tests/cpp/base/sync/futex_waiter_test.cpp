// FutexWaiter: notifications and wait words wake a thread that sleeps on several words, and none is missed.

#include "base/sync/futex_waiter.h"

#include <memory>
#include <thread>
#include <vector>

#include "needs_futex_waiter.h"
#include "outcomes.h"

using namespace torchrpc;

namespace {

TimePoint in(std::chrono::milliseconds time) { return std::chrono::steady_clock::now() + time; }

/// A thread that sleeps once.
class WakeTarget {
 public:
  WakeTarget(FutexWaiter& waiter, std::atomic<bool>& done, std::vector<FutexWaiter::WaitWord> wait_words = {})
      : thread_([this, &waiter, &done, wait_words = std::move(wait_words)] {
          waiter.wait([&] { return done.load(); }, wait_words, kNever);
          awake_ = true;
        }) {}
  bool wakes() {
    return test::eventually([this] { return awake_.load(); });
  }
  bool staysAsleep() {
    return test::remains([this] { return !awake_; });
  }

 private:
  std::atomic<bool> awake_{false};
  std::jthread thread_;
};

std::shared_ptr<FutexWaiter::Word> word(uint32_t value) { return std::make_shared<FutexWaiter::Word>(value); }

}  // namespace

TEST_CASE("a notification wakes the thread that sleeps, not one that sleeps later") {
  NEEDS_FUTEX_WAITER;
  FutexWaiter waiter;
  std::atomic<bool> done{false};
  waiter.notify();
  WakeTarget thread(waiter, done);
  REQUIRE(thread.staysAsleep());
  done = true;
  waiter.notify();
  CHECK(thread.wakes());
}

TEST_CASE("a thread does not sleep if the predicate is true or a wait word differs already") {
  NEEDS_FUTEX_WAITER;
  FutexWaiter waiter;
  std::atomic<bool> done{true};
  CHECK(WakeTarget(waiter, done).wakes());
  done = false;
  CHECK(WakeTarget(waiter, done, {{word(1), 1}, {word(0), 1}}).wakes());
}

TEST_CASE("each of several wait words wakes the thread") {
  NEEDS_FUTEX_WAITER;
  const std::vector<std::shared_ptr<FutexWaiter::Word>> words = {word(2), word(2), word(7)};
  for (const auto& changed : words) {
    FutexWaiter waiter;
    std::atomic<bool> done{false};
    WakeTarget thread(waiter, done, {{words[0], 2}, {words[1], 2}, {words[2], 7}});
    REQUIRE(thread.staysAsleep());
    const auto before = changed->exchange(0);
    FutexWaiter::wake(*changed);
    CHECK(thread.wakes());
    *changed = before;
  }
}

TEST_CASE("a sleep ends at its deadline") {
  NEEDS_FUTEX_WAITER;
  FutexWaiter waiter;
  const auto deadline = in(std::chrono::milliseconds(20));
  waiter.wait([] { return false; }, {}, deadline);
  CHECK(std::chrono::steady_clock::now() >= deadline);
  CHECK(std::chrono::steady_clock::now() < deadline + std::chrono::seconds(5));
}

TEST_CASE("a notification while the thread falls asleep is not missed") {
  NEEDS_FUTEX_WAITER;
  FutexWaiter waiter;
  std::atomic<int> sent{0}, received{0};
  std::jthread sleeper([&] {
    while (received < 20'000) {
      while (sent == received) waiter.wait([&] { return sent != received; }, {}, kNever);
      ++received;
    }
  });
  while (sent < 20'000) {
    ++sent;
    waiter.notify();
    while (received < sent) std::this_thread::yield();
  }
  sleeper.join();
  CHECK(received == 20'000);
}
