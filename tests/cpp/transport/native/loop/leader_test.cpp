// One thread at a time is the leader.

#include "transport/native/loop/leader.h"

#include <catch2/catch.hpp>

#include <thread>

#include "needs_futex_waiter.h"

using namespace torchrpc;
using namespace torchrpc::native;

TEST_CASE("one thread leads until it resigns") {
  Leader leader;
  FutexWaiter first, second;
  CHECK_FALSE(leader.exists());
  CHECK(leader.tryLead(first, /*preemptible=*/false));
  CHECK(leader.exists());
  CHECK(leader.is(first));
  CHECK_FALSE(leader.tryLead(second, /*preemptible=*/false));
  CHECK_FALSE(leader.is(second));
  CHECK_FALSE(leader.resign(second));
  CHECK(leader.resign(first));
  CHECK_FALSE(leader.exists());
  CHECK(leader.tryLead(second, /*preemptible=*/false));
}

TEST_CASE("a preemptible leader is woken when another thread replaces it") {
  NEEDS_FUTEX_WAITER;
  Leader leader;
  FutexWaiter idle, caller;
  REQUIRE(leader.tryLead(idle, /*preemptible=*/true));
  bool resigned = true;
  std::jthread parked([&] {
    while (leader.is(idle)) idle.wait([&] { return !leader.is(idle); }, {}, kNever);
    resigned = leader.resign(idle);
  });
  CHECK(leader.tryLead(caller, /*preemptible=*/false));
  parked.join();  // or the test hangs
  CHECK_FALSE(resigned);
  CHECK(leader.is(caller));
}
