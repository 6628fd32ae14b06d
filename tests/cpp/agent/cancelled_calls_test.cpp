// The entries of cancelled calls: who is told, and that they end.

#include "calls/cancelled_calls.h"

#include <catch2/catch.hpp>

using namespace torchrpc;

TEST_CASE("a handler is called once, by the cancellation of its own call", "[cancelled]") {
  CancelledCalls calls;
  int told = 0;
  calls.onCancelled({1, 7}, [&] { ++told; });
  calls.cancel({2, 7});
  calls.cancel({1, 8});
  CHECK(told == 0);
  calls.cancel({1, 7});
  calls.cancel({1, 7});
  CHECK(told == 1);
  CHECK(calls.isCancelled({1, 7}));
  CHECK_FALSE(calls.onCancelled({1, 7}, [&] { ++told; }));  // too late to wait for it
  CHECK(told == 1);
}

TEST_CASE("a call that is abandoned is not cancelled, and one that is cancelled is abandoned", "[cancelled]") {
  CancelledCalls calls;
  int cancelled = 0, abandoned = 0;
  for (const CallId call : {7, 8}) {
    calls.onCancelled({1, call}, [&] { ++cancelled; });
    calls.onCancelled({1, call}, [&] { ++abandoned; }, CancelKind::kAbandon);
  }
  calls.cancel({1, 7}, CancelKind::kAbandon);
  CHECK((cancelled == 0 && abandoned == 1));
  CHECK_FALSE(calls.isCancelled({1, 7}));
  CHECK(calls.onCancelled({1, 7}, [] {}));
  CHECK_FALSE(calls.onCancelled({1, 7}, [&] { ++abandoned; }, CancelKind::kAbandon));
  calls.cancel({1, 7});
  CHECK((cancelled == 1 && abandoned == 1));
  calls.cancel({1, 8});
  CHECK((cancelled == 2 && abandoned == 2));
  CHECK(calls.isCancelled({1, 8}));
  calls.onCancelled({2, 1}, [&] { ++abandoned; }, CancelKind::kAbandon);
  calls.loseLink(2);
  CHECK(abandoned == 3);
}

TEST_CASE("an answered call has no entry any more", "[cancelled]") {
  CancelledCalls calls;
  int told = 0;
  calls.onCancelled({1, 7}, [&] { ++told; });
  calls.cancel({1, 8});
  CHECK(calls.size() == 2);
  calls.onAnswered({1, 7});
  calls.onAnswered({1, 8});
  calls.onAnswered({1, 9});
  CHECK(calls.size() == 0);
  CHECK_FALSE(calls.isCancelled({1, 8}));
  CHECK(told == 0);
}

TEST_CASE("the end of a link tells the handlers of its calls, and removes their entries", "[cancelled]") {
  CancelledCalls calls;
  int told = 0;
  for (CallId call = 1; call <= 3; ++call) calls.onCancelled({1, call}, [&] { ++told; });
  calls.onCancelled({2, 1}, [&] { told += 100; });
  calls.cancel({1, 9});
  calls.loseLink(1);
  CHECK(told == 3);
  CHECK(calls.size() == 1);
}

TEST_CASE("a peer that cancels what it has not called cannot make entries without end", "[cancelled]") {
  CancelledCalls calls;
  int told = 0;
  calls.onCancelled({1, 1}, [&] { ++told; });
  for (CallId call = 2; call < 10 * CancelledCalls::kMost; ++call) calls.cancel({1, call});
  CHECK(calls.size() <= CancelledCalls::kMost);
  CHECK(calls.isCancelled({1, 10 * CancelledCalls::kMost - 1}));  // the latest stay
  calls.cancel({1, 1});                                           // and what waits to be told
  CHECK(told == 1);
}

TEST_CASE("a request that cannot be cancelled has no entry", "[cancelled]") {
  CancelledCalls calls;
  calls.onCancelled({}, [] { FAIL("it is told"); });
  CHECK(calls.size() == 0);
  CHECK_FALSE(calls.isCancelled({}));
}
