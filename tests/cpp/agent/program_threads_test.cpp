// Which threads call for the program while their node ends.

#include "calls/program_threads.h"

#include <catch2/catch.hpp>

using namespace torchrpc;

namespace {

TimePoint second(int number) { return TimePoint(std::chrono::seconds(number)); }

constexpr int kThread = 7;

}  // namespace

TEST_CASE("a thread is the program's once none of the functions that are served can have waited for a call of it") {
  ProgramThreads threads;
  threads.onArrived(second(1));
  threads.onArrived(second(5));
  threads.onCallEnded(kThread, second(2), 2);
  CHECK_FALSE(threads.contains(kThread));  // the first function may have waited for it
  threads.onAnswered(second(1));
  threads.onCallEnded(kThread, second(6), 1);
  CHECK_FALSE(threads.contains(kThread));
  threads.onCallEnded(kThread + 1, second(2), 2);  // a request that came before the end began is unanswered, too
  CHECK_FALSE(threads.contains(kThread + 1));
  threads.onCallEnded(kThread, second(2), 1);
  CHECK(threads.contains(kThread));
  CHECK_FALSE(threads.contains(kThread + 1));
}

TEST_CASE("requests that arrive at the same time are told apart") {
  ProgramThreads threads;
  for (int i = 0; i < 2; ++i) threads.onArrived(second(1));
  threads.onAnswered(second(1));
  threads.onAnswered(second(9));  // one that it does not know
  threads.onCallEnded(kThread, second(1), 1);
  CHECK_FALSE(threads.contains(kThread));
  threads.onAnswered(second(1));
  threads.onCallEnded(kThread, second(1), 0);
  CHECK(threads.contains(kThread));
}
