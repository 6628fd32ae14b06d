// Waiter: values that are set in time, late, or after the wait has been abandoned.

#include "base/sync/waiter.h"

#include <catch2/catch.hpp>

#include <thread>

namespace torchrpc {
TEST_CASE("a waiter returns the value that another thread sets") {
  Waiter<int> waiter;
  std::thread setter([&] { waiter.set(7); });
  std::optional<int> value;
  while (!value) value = waiter.waitFor(std::chrono::seconds(10));
  setter.join();
  REQUIRE(value == 7);
}

TEST_CASE("a wait that times out returns nothing, and the value can still be set") {
  Waiter<int> waiter;
  REQUIRE_FALSE(waiter.waitFor(std::chrono::milliseconds(1)));
  REQUIRE_FALSE(waiter.set(7));
  REQUIRE(waiter.waitFor(std::chrono::milliseconds(1)) == 7);
}

TEST_CASE("a value that is set after the wait was abandoned is returned to its setter") {
  Waiter<int> waiter;
  REQUIRE_FALSE(waiter.abandon());
  REQUIRE(waiter.set(7) == 7);
}

TEST_CASE("a value that was set just before the wait is abandoned is returned to the waiting thread") {
  Waiter<int> waiter;
  waiter.set(7);
  REQUIRE(waiter.abandon() == 7);
}

}  // namespace torchrpc
