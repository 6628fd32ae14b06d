// Cancelled calls and deadlines, through the public API.

#include <ATen/ATen.h>

#include <atomic>
#include <latch>

#include "api/group.h"
#include "outcomes.h"
#include "torchrpc/function.h"
#include "torchrpc/task.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

/// What a function that asks whether it is cancelled tells the test.
struct Watch {
  std::latch arrived{1};
  std::latch noticed{1};
  std::atomic<bool> gives_up{false};
};

std::shared_ptr<Watch> watchedFunction(const std::string& name) {
  auto watch = std::make_shared<Watch>();
  registerFunction(name, [watch](const Call& call) {
    watch->arrived.count_down();
    test::eventually([&] { return call.cancelled() || watch->gives_up; });
    if (call.cancelled()) watch->noticed.count_down();
    return 1;
  });
  return watch;
}

bool arrives(std::latch& latch) {
  return test::eventually([&] { return latch.try_wait(); });
}

/// The worker at the end of a chain of `hops` calls, each of which returns a future, waits for the test.
std::shared_ptr<Watch> last_of_chain;
Future<int> passAlong(const Call& call, int hops) {
  const auto next = call.node.workers().at((call.node.self().id + 1) % call.node.workers().size());
  if (hops == 0) return call.node.callAsync<int>(next, "lastOfChain");
  return call.node.callAsync<int>(next, "passAlong", hops - 1).then([](int value) { return value + 1; });
}
TORCHRPC_FUNCTION(passAlong);

double secondsLeft(const Call& call) { return std::chrono::duration<double>(call.timeLeft()).count(); }
TORCHRPC_FUNCTION(secondsLeft);
double secondsLeftThere(const Call& call) {
  return call.node.withTimeout(kNoLimit).call<double>(1 - call.node.self().id, "secondsLeft");
}
TORCHRPC_FUNCTION(secondsLeftThere);
Future<double> secondsLeftLater(const Call& call) {
  return call.node.callAsync<double>(1 - call.node.self().id, "secondsLeft").then([node = call.node](double) {
    return node.withTimeout(kNoLimit).call<double>(1 - node.self().id, "secondsLeft");
  });
}
TORCHRPC_FUNCTION(secondsLeftLater);

}  // namespace

TEST_CASE("a cancelled call ends at once, and the function is told") {
  Group group(2);
  const auto to = GENERATE(0, 1);
  const auto name = "cancelled" + std::to_string(to);
  const auto watch = watchedFunction(name);
  const auto future = group[0].callAsync<int>(to, name);
  const auto after = future.then([](int) { return 2; });
  watch->arrived.wait();
  CHECK(future.cancel());
  CHECK(errorOf([&] { future.wait(); }).code() == ErrorCode::kCancelled);
  CHECK(errorOf([&] { after.wait(); }).code() == ErrorCode::kCancelled);
  CHECK(arrives(watch->noticed));
  CHECK_FALSE(future.cancel());
  watch->gives_up = true;
  group.shutdown();
}

TEST_CASE("a future that is ready cannot be cancelled") {
  Group group(2);
  registerFunction("seven", [] { return 7; });
  const auto future = group[0].callAsync<int>(1, "seven");
  CHECK(future.wait() == 7);
  CHECK_FALSE(future.cancel());
  CHECK(future.wait() == 7);
}

TEST_CASE("the end of a caller cancels its calls") {
  Group group(2);
  const auto watch = watchedFunction("callerEnds");
  const auto future = group[0].callAsync<int>(1, "callerEnds");
  watch->arrived.wait();
  group[0].stop();
  CHECK(arrives(watch->noticed));
  watch->gives_up = true;
}

TEST_CASE("other calls of the same caller are not cancelled") {
  Group group(2);
  const auto cancelled = watchedFunction("oneOfTwo"), other = watchedFunction("otherOfTwo");
  const auto future = group[0].callAsync<int>(1, "oneOfTwo"), going = group[0].callAsync<int>(1, "otherOfTwo");
  cancelled->arrived.wait();
  other->arrived.wait();
  future.cancel();
  CHECK(arrives(cancelled->noticed));
  CHECK_FALSE(other->noticed.try_wait());
  other->gives_up = true;
  CHECK(going.wait() == 1);
}

TEST_CASE("a cancelled call cancels the calls for which its function waits, over several workers") {
  Group group(3);
  last_of_chain = watchedFunction("lastOfChain");
  const auto future = group[0].callAsync<int>(1, "passAlong", 4);
  last_of_chain->arrived.wait();
  CHECK(future.cancel());
  CHECK(arrives(last_of_chain->noticed));
  last_of_chain->gives_up = true;
}

TEST_CASE("cancelling a combination cancels all of it; the function of a cancelled then() does not run") {
  Group group(2);
  const auto first = watchedFunction("firstOfAll"), second = watchedFunction("secondOfAll");
  std::atomic<bool> ran{false};
  const auto a = group[0].callAsync<int>(1, "firstOfAll").then([&](const Future<int>& it) {
    ran = true;
    return it.wait();
  });
  const auto b = group[0].callAsync<int>(1, "secondOfAll");
  first->arrived.wait();
  second->arrived.wait();
  const auto both = whenAll(a, b);
  CHECK(both.cancel());
  CHECK(errorOf([&] { both.wait(); }).code() == ErrorCode::kCancelled);
  CHECK(arrives(first->noticed));
  CHECK(arrives(second->noticed));
  first->gives_up = second->gives_up = true;
  group.shutdown();
  CHECK_FALSE(ran);
}

TEST_CASE("a call that may be repeated ends for its caller, and its function goes on") {
  Group group(2);
  const auto watch = watchedFunction("keyedAndCancelled");
  const auto node = group[0].withKey("once");
  const auto future = node.callAsync<int>(1, "keyedAndCancelled");
  watch->arrived.wait();
  CHECK(future.cancel());
  CHECK(errorOf([&] { future.wait(); }).code() == ErrorCode::kCancelled);
  watch->gives_up = true;
  CHECK(node.call<int>(1, "keyedAndCancelled") == 1);  // the result of the one run
  CHECK_FALSE(watch->noticed.try_wait());
}

TEST_CASE("a worker that cancels many calls leaves nothing behind") {
  Group group(2);
  registerFunction("quick", [](int x) { return x; });
  for (int i = 0; i < 2000; ++i) {
    const auto future = group[0].callAsync<int>(1, "quick", i);
    if (i % 2 == 0) future.cancel();
  }
  CHECK(group[0].call<int>(1, "quick", 5) == 5);
  group.shutdown();
}

TEST_CASE("a cancelled call that has not begun does not run") {
  Group group(2);
  const auto first = watchedFunction("firstThread"), second = watchedFunction("secondThread");
  std::atomic<int> runs{0};
  registerFunction("thirdCall", [&runs] { ++runs; });
  const auto a = group[0].callAsync<int>(1, "firstThread"), b = group[0].callAsync<int>(1, "secondThread");
  first->arrived.wait();
  second->arrived.wait();  // both threads of worker1 are busy
  const auto third = group[0].callAsync<void>(1, "thirdCall"), fourth = group[0].callAsync<void>(1, "thirdCall");
  CHECK(third.cancel());
  CHECK(a.cancel());
  CHECK(arrives(first->noticed));  // so the message that cancels the third call has arrived, too
  second->gives_up = true;
  fourth.wait();
  CHECK(b.wait() == 1);
  group.shutdown();
  CHECK(runs == 1);
}

TEST_CASE("a cancelled call ends the calls for which its function waits on its thread") {
  Group group(3);
  const auto to = GENERATE(0, 1);
  const auto name = "waitedFor" + std::to_string(to);
  const auto watch = watchedFunction(name);
  std::atomic<bool> could_clean_up{false};
  const auto waiting = "waits" + name;
  registerFunction("five" + name, [] { return 5; });
  registerFunction(waiting, [&could_clean_up, name](const Call& call) {
    try {
      return call.node.call<int>(2, name);
    } catch (const Error& error) {
      could_clean_up = error.code() == ErrorCode::kCancelled && call.node.call<int>(2, "five" + name) == 5;
      throw;
    }
  });
  const auto future = group[0].callAsync<int>(to, waiting);
  watch->arrived.wait();
  CHECK(future.cancel());
  CHECK(arrives(watch->noticed));
  watch->gives_up = true;
  group.shutdown();  // waits for the function
  CHECK(could_clean_up);
}

TEST_CASE("a call that times out is cancelled, unless the node's options say otherwise") {
  const bool cancels = GENERATE(true, false);
  Group group(2, [&](NodeOptions& options) { options.cancel_on_timeout = cancels; });
  const auto to = GENERATE(0, 1);
  std::shared_ptr<Watch> watch;
  // A call that times out before its function has begun shows nothing: another one gets more time.
  for (auto timeout = 50ms; !watch || !watch->arrived.try_wait(); timeout *= 2) {
    if (watch) watch->gives_up = true;  // its function may still begin
    const auto name = "timesOut" + std::to_string(cancels) + std::to_string(to) + std::to_string(timeout.count());
    watch = watchedFunction(name);
    CHECK(errorOf([&] { group[0].withTimeout(timeout).call<int>(to, name); }).code() == ErrorCode::kTimeout);
  }
  CHECK((cancels ? arrives(watch->noticed) : !watch->noticed.try_wait()));
  watch->gives_up = true;
  group.shutdown();
}

TEST_CASE("the calls that a function makes inherit the deadline of its caller") {
  Group group(2, [](NodeOptions& options) { options.propagate_deadlines = true; });
  const auto& node = group[0];
  const double here = node.withTimeout(8s).call<double>(1, "secondsLeft");
  CHECK((here > 0 && here <= 8));
  const double there = node.withTimeout(8s).call<double>(1, "secondsLeftThere");
  CHECK((there > 0 && there <= 8));
  const double later = node.withTimeout(8s).call<double>(1, "secondsLeftLater");
  CHECK((later > 0 && later <= 8));
  CHECK(node.withTimeout(kNoLimit).call<double>(1, "secondsLeft") > 1e6);
}

TEST_CASE("a call says nothing of its deadline unless deadlines are propagated") {
  Group group(2);
  CHECK(group[0].withTimeout(8s).call<double>(1, "secondsLeft") > 1e6);
}
