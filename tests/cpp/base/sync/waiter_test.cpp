// Waiters: what comes, what comes late, what comes to nobody.

#include "base/sync/waiter.h"

#include <catch2/catch.hpp>

#include <thread>

namespace torchrpc {
TEST_CASE("a waiter gives the value that another thread sets") {
  Waiter<int> waiter;
  std::thread setter([&] { waiter.set(7); });
  std::optional<int> value;
  while (!value) value = waiter.waitFor(std::chrono::seconds(10));
  setter.join();
  REQUIRE(value == 7);
}

TEST_CASE("a wait that is over gives nothing, and the value can still come") {
  Waiter<int> waiter;
  REQUIRE_FALSE(waiter.waitFor(std::chrono::milliseconds(1)));
  REQUIRE_FALSE(waiter.set(7));
  REQUIRE(waiter.waitFor(std::chrono::milliseconds(1)) == 7);
}

TEST_CASE("a value that nobody waits for any more is given back") {
  Waiter<int> waiter;
  REQUIRE_FALSE(waiter.abandon());
  REQUIRE(waiter.set(7) == 7);
}

TEST_CASE("a value that came just before its waiter gave up is given to that") {
  Waiter<int> waiter;
  waiter.set(7);
  REQUIRE(waiter.abandon() == 7);
}

}  // namespace torchrpc
