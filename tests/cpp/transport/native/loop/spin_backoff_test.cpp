// When threads that poll give way to threads that compute.

#include "transport/native/loop/spin_backoff.h"

#include <catch2/catch.hpp>

using namespace torchrpc;
using namespace torchrpc::native;
using namespace std::chrono_literals;

namespace {
constexpr TimePoint kBegin = TimePoint() + 1h;
}

TEST_CASE("after a short yield a thread goes on polling") {
  SpinBackoff backoff;
  CHECK(backoff.recordYield(kBegin, kBegin + 20us));
  CHECK_FALSE(backoff.isPaused(kBegin + 20us));
}

TEST_CASE("after a long yield a thread stops polling, but others may begin") {
  SpinBackoff backoff;
  CHECK_FALSE(backoff.recordYield(kBegin, kBegin + 499us));
  CHECK_FALSE(backoff.isPaused(kBegin + 499us));
}

TEST_CASE("after a yield of a time slice no thread begins to poll for twice that time") {
  SpinBackoff backoff;
  CHECK_FALSE(backoff.recordYield(kBegin, kBegin + 1ms));
  CHECK(backoff.isPaused(kBegin + 1ms));
  CHECK(backoff.isPaused(kBegin + 3ms - 1ns));
  CHECK_FALSE(backoff.isPaused(kBegin + 3ms));
}

TEST_CASE("a pause that is needed again within its own length is doubled, up to 50 yields") {
  SpinBackoff backoff;
  auto begin = kBegin;
  Duration pause = 0ms;
  for (const auto expected : {2ms, 4ms, 8ms, 16ms, 32ms, 50ms, 50ms}) {
    CAPTURE(expected.count());
    backoff.recordYield(begin, begin + 1ms);
    CHECK(backoff.isPaused(begin + 1ms + expected - 1ns));
    CHECK_FALSE(backoff.isPaused(begin + 1ms + expected));
    // The last moment at which the next pause counts as needed again.
    pause = expected;
    begin += 1ms + 2 * pause - 1ns;
  }
}

TEST_CASE("a pause that is needed again later is a first one") {
  SpinBackoff backoff;
  backoff.recordYield(kBegin, kBegin + 1ms);
  const auto later = kBegin + 1ms + 2 * 2ms;
  backoff.recordYield(later, later + 1ms);
  CHECK_FALSE(backoff.isPaused(later + 1ms + 2ms));
}
