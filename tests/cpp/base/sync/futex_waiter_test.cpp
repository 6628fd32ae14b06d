// Alarms: what wakes a thread that sleeps on several words, and that nothing of it is missed.

#include "base/sync/futex_waiter.h"

#include <memory>
#include <thread>
#include <vector>

#include "needs_futex_waiter.h"
#include "outcomes.h"

using namespace torchrpc;

namespace {

TimePoint in(std::chrono::milliseconds time) { return std::chrono::steady_clock::now() + time; }

/// A thread that sleeps once, for at most ten seconds.
class WakeTarget {
 public:
  WakeTarget(FutexWaiter& waiter, std::atomic<bool>& over, std::vector<FutexWaiter::WaitWord> bells = {})
      : thread_([this, &waiter, &over, bells = std::move(bells)] {
          waiter.sleep([&] { return over.load(); }, bells, kNever);
          awake_ = true;
        }) {}
  bool awakes() {
    return test::eventually([this] { return awake_.load(); });
  }
  bool sleepsOn() {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return !awake_;
  }

 private:
  std::atomic<bool> awake_{false};
  std::jthread thread_;
};

std::shared_ptr<FutexWaiter::Word> word(uint32_t value) { return std::make_shared<FutexWaiter::Word>(value); }

}  // namespace

TEST_CASE("an waiter wakes who sleeps, and nobody who comes later") {
  NEEDS_ALARM;
  FutexWaiter waiter;
  std::atomic<bool> over{false};
  waiter.ring();
  WakeTarget sleeper(waiter, over);
  REQUIRE(sleeper.sleepsOn());
  over = true;
  waiter.ring();
  CHECK(sleeper.awakes());
}

TEST_CASE("nobody sleeps for what is so already") {
  NEEDS_ALARM;
  FutexWaiter waiter;
  std::atomic<bool> over{true};
  CHECK(WakeTarget(waiter, over).awakes());
  over = false;
  CHECK(WakeTarget(waiter, over, {{word(1), 1}, {word(0), 1}}).awakes());
}

TEST_CASE("any bell wakes who sleeps on several") {
  NEEDS_ALARM;
  const std::vector<std::shared_ptr<FutexWaiter::Word>> words = {word(2), word(2), word(7)};
  for (const auto& rung : words) {
    FutexWaiter waiter;
    std::atomic<bool> over{false};
    WakeTarget sleeper(waiter, over, {{words[0], 2}, {words[1], 2}, {words[2], 7}});
    REQUIRE(sleeper.sleepsOn());
    const auto before = rung->exchange(0);
    FutexWaiter::wake(*rung);
    CHECK(sleeper.awakes());
    *rung = before;
  }
}

TEST_CASE("an waiter sleeps no longer than asked for") {
  NEEDS_ALARM;
  FutexWaiter waiter;
  const auto latest = in(std::chrono::milliseconds(20));
  waiter.sleep([] { return false; }, {}, latest);
  CHECK(std::chrono::steady_clock::now() >= latest);
  CHECK(std::chrono::steady_clock::now() < latest + std::chrono::seconds(5));
}

TEST_CASE("an waiter that rings while its thread lies down is not missed") {
  NEEDS_ALARM;
  FutexWaiter waiter;
  std::atomic<int> given{0}, taken{0};
  std::jthread sleeper([&] {
    while (taken < 20'000) {
      while (given == taken) waiter.sleep([&] { return given != taken; }, {}, kNever);
      ++taken;
    }
  });
  while (given < 20'000) {
    ++given;
    waiter.ring();
    while (taken < given) std::this_thread::yield();
  }
  sleeper.join();
  CHECK(taken == 20'000);
}
