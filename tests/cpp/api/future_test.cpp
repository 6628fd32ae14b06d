// Futures of the public API: continuations, executors, combinations, cancellation, coroutines.

#include "torchrpc/future.h"

#include <ATen/ATen.h>

#include <atomic>
#include <deque>
#include <filesystem>
#include <latch>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "api/group.h"
#include "outcomes.h"
#include "torchrpc/autograd.h"
#include "torchrpc/function.h"
#include "torchrpc/task.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

int increment(int x) { return x + 1; }
TORCHRPC_FUNCTION(increment);
int refuse(const std::string& why) { throw std::runtime_error(why); }
TORCHRPC_FUNCTION(refuse);
int lengthOfView(std::string_view text) { return static_cast<int>(text.size()); }
TORCHRPC_FUNCTION(lengthOfView);
int lengthIfAny(const std::optional<std::string>& text) { return text ? static_cast<int>(text->size()) : -1; }
TORCHRPC_FUNCTION(lengthIfAny);

/// Functions that wait for a latch, of which the test has the other end.
struct Gate {
  std::latch arrived{1};
  std::latch release{1};
};
std::shared_ptr<Gate> gateOf(const std::string& name) {
  auto gate = std::make_shared<Gate>();
  registerFunction(name, [gate] {
    gate->arrived.count_down();
    gate->release.wait();
  });
  return gate;
}

Task<void> countWhenReady(Future<void> awaited, std::atomic<int>& count) {
  try {
    co_await awaited;
  } catch (const Error&) {
    // Cancelled: ready, too.
  }
  ++count;
}

constexpr int kLongChain = 30'000;  // whose frames would not fit into a stack

/// Returns the last of a chain of continuations that run on the thread that settles the first future.
Future<int> chainOn(Future<int> first) {
  for (int i = 0; i < kLongChain; ++i) first = first.then(Executor::inlined(), [](int x) { return x + 1; });
  return first;
}

/// Counts down by one call after the other.
Future<int> countDown(const NodeRef& node, int n) {
  if (n == 0) return Future<int>::of(0);
  return node.callAsync(0, &increment, n - 2).then([node](int left) { return countDown(node, left); });
}

}  // namespace

TEST_CASE("chains and loops of any number of futures need no more stack") {
  Group group(2);
  {
    Promise<int> promise;
    const auto last = chainOn(promise.future());
    promise.set(1);
    CHECK(last.wait() == kLongChain + 1);
  }
  {
    std::optional<Promise<int>> dropped(std::in_place);
    const auto last = chainOn(dropped->future());
    dropped.reset();
    CHECK(errorOf([&] { last.wait(); }).code() == ErrorCode::kShutdown);
  }
  {
    const Promise<int> promise;
    const auto last = chainOn(promise.future());
    CHECK(last.cancel());
    CHECK(errorOf([&] { last.wait(); }).code() == ErrorCode::kCancelled);
    CHECK(errorOf([&] { promise.future().wait(); }).code() == ErrorCode::kCancelled);
  }
  CHECK(countDown(group[0], kLongChain).wait() == 0);
  const auto ended = chainOn(group[0].callAsync(1, &increment, 1));
  CHECK(ended.wait() == kLongChain + 2);
}

TEST_CASE("continuations need not be copyable") {
  Group group(2);
  const auto future = group[0].callAsync(1, &increment, 1);
  CHECK(future.then([two = std::make_unique<int>(2)](int x) { return x * *two; }).wait() == 4);
  CHECK(future.then([two = std::make_unique<int>(2)](const Future<int>& x) { return x.wait() + *two; }).wait() == 4);
  CHECK(future.then(Executor::inlined(), [one = std::make_unique<int>(1)](int x) { return x + *one; }).wait() == 3);
  const auto failed = group[0].callAsync(1, &refuse, "no");
  CHECK(failed.thenError([five = std::make_unique<int>(5)](const Error&) { return *five; }).wait() == 5);
}

TEST_CASE("a future that has not been assigned is not valid, and its methods say so") {
  Future<int> future;
  CHECK_FALSE(future.valid());
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { future.wait(); }, [&] { future.wait(1s); }, [&] { future.waitFor(1s); }, [&] { future.ready(); },
           [&] { future.cancel(); }, [&] { future.then([](int) {}); },
           [&] { future.thenError([](const Error&) { return 0; }); }, [&] { whenAll(future, Future<int>::of(1)); },
           [&] { whenAny(future); }}) {
    const auto error = errorOf(use);
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    CHECK_THAT(error.text(), Catch::Contains("has not been assigned"));
  }
  Group group(2);
  future = group[0].callAsync(1, &increment, 4);
  CHECK(future.valid());
  CHECK(future.wait() == 5);
}

TEST_CASE("waitFor() returns nothing after its time-out, and the call goes on") {
  Group group(2);
  const auto gate = gateOf("waitForGate");
  const auto future = group[0].callAsync<void>(1, "waitForGate");
  CHECK_FALSE(future.waitFor(1ms));
  const auto value = future.then([] { return 3; });
  CHECK(value.waitFor(1ms) == std::nullopt);
  gate->release.count_down();
  CHECK(future.waitFor(20s));
  CHECK(value.waitFor(20s) == 3);
  CHECK(errorOf([&] { group[0].callAsync(1, &refuse, "no").waitFor(20s); }).code() == ErrorCode::kUserException);
}

TEST_CASE("all threads that wait for copies of a future wake when it is ready or cancelled") {
  const auto transport = GENERATE("native", "tcp");
  const auto threads = GENERATE(1, 2, 3, 8, 64);
  const auto ends = GENERATE("reply", "cancel");
  Group group(2, [&](NodeOptions& options) {
    options.transport = transport;
    options.timeout = 60s;
  });
  for (int round = 0; round < 10; ++round) {
    static int number = 0;
    const auto name = "manyWaitersGate" + std::to_string(number++);
    const auto gate = gateOf(name);
    const auto future = group[0].callAsync<void>(1, name);
    gate->arrived.wait();
    const auto other_gate = gateOf("other " + name);  // of a call for which another thread waits
    const auto other = group[0].callAsync<void>(1, "other " + name);
    std::latch begun(threads + 1);
    std::atomic<int> awake{0};
    const auto wait = [&](int kind) {
      begun.count_down();
      try {
        if (kind % 3 == 0) future.wait();
        if (kind % 3 == 1) future.wait(50s);
        if (kind % 3 == 2 && !future.waitFor(50s)) return;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kCancelled) return;
      }
      ++awake;
    };
    std::vector<std::thread> waiting;
    for (int i = 0; i < threads; ++i) waiting.emplace_back(wait, i);
    std::thread waits_for_other([&] {
      begun.count_down();
      other.wait();
    });
    future.thenError([&](const Error&) {}).then([&] { ++awake; });
    const auto task = countWhenReady(future, awake).start();
    begun.wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(round % 3));  // a guess: some or all of them are asleep
    if (ends == std::string("cancel")) CHECK(future.cancel());
    gate->release.count_down();
    CHECK(test::eventually([&] { return awake == threads + 2; }));
    other_gate->release.count_down();
    for (auto& thread : waiting) thread.join();
    waits_for_other.join();
  }
}

TEST_CASE("functions, texts and promises that are null are refused with an error") {
  Group group(1);
  const auto& node = group[0];
  const auto ready = Future<int>::of(1);
  const char* no_text = nullptr;
  int (*no_function)(int) = nullptr;
  const std::function<int(int)> empty;
  int (*no_handler)(const Error&) = nullptr;
  struct Object {
    int get() { return 1; }
  };
  int (Object::*no_method)() = nullptr;
  const Promise<int> kept;
  auto moved = kept;
  const auto other = std::move(moved);
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { registerFunction("nullFunction", no_function); }, [&] { registerFunction("nullFunction", empty); },
           [&] { registerFunction("nullFunction", no_method); }, [&] { ready.then(no_function); },
           [&] { ready.then(empty); }, [&] { ready.thenError(no_handler); }, [&] { node.call(0, no_function, 1); },
           [&] { node.call(0, &refuse, no_text); }, [&] { node.call(0, &lengthOfView, no_text); },
           [&] { node.call(0, &lengthIfAny, no_text); }, [&] { node.call<int>(no_text, "increment", 1); },
           [&] { node.onMemberChange(nullptr); }, [&] { node.onWorkerLost(nullptr); },
           [&] { node.call<int>(0, no_text, 1); }, [&] { moved.set(1); },  // NOLINT: it has been moved from
           [&] { moved.fail(Error(ErrorCode::kUnknown, "")); }, [&] { moved.future().wait(); }}) {
    CHECK(errorOf(use).code() == ErrorCode::kInvalidArgument);
  }
  other.set(2);
  CHECK(kept.future().wait() == 2);
  group.shutdown();
}

TEST_CASE("a future gives its value or its error without an exception") {
  Group group(2);
  auto value = group[0].callAsync(1, &increment, 4).expected();
  CHECK((value && value.hasValue() && *value == 5 && value.valueOr(0) == 5));
  *value = 7;
  CHECK(value.value() == 7);
  CHECK(errorOf([&] { (void)value.error(); }).code() == ErrorCode::kInvalidArgument);

  const auto failed = group[0].callAsync<int>(1, &refuse, "no").expected(20s);
  CHECK_FALSE(failed);
  CHECK(failed.error().code() == ErrorCode::kUserException);
  CHECK(failed.valueOr(3) == 3);
  CHECK(errorOf([&] { (void)failed.value(); }).text() == failed.error().text());
  CHECK(errorOf([&] { (void)*failed; }).code() == ErrorCode::kUserException);

  const auto gate = gateOf("gateOfExpected");
  const auto waiting = group[0].callAsync<void>(1, "gateOfExpected");
  CHECK(waiting.expected(0s).error().code() == ErrorCode::kTimeout);
  gate->release.count_down();
  CHECK(waiting.expected().hasValue());
  CHECK(Expected<void>().hasValue());

  auto text = Future<std::string>::of("a text").expected();
  CHECK(text->size() == 6);
  const std::string moved = *std::move(text);
  CHECK(moved == "a text");
  const auto other = Future<int>::of(1).then([](int) -> int { throw std::out_of_range("of a continuation"); });
  CHECK_THROWS_AS(other.expected(), std::out_of_range);
  group.shutdown();
}

TEST_CASE("the threads of an executor end, also if one of their tasks holds its last copy") {
  for (int round = 0; round < 2; ++round) {
    std::latch begun(1), release(1);
    std::atomic<pid_t> thread{0};
    auto executor = std::make_shared<std::optional<Executor>>(Executor::threads(1));
    executor->value().post()([&, executor] {
      thread = gettid();
      begun.count_down();
      release.wait();
      executor->reset();
    });
    begun.wait();
    release.count_down();
    const auto folder = "/proc/self/task/" + std::to_string(thread);
    CHECK(test::eventually([&] { return !std::filesystem::exists(folder); }));
  }
}

TEST_CASE("a function that returns an empty future fails, whatever the type of its value") {
  registerFunction("emptyVoid", [] { return Future<void>(); });
  registerFunction("emptyInt", [] { return Future<int>(); });
  registerFunction("emptyOnThreads", [] { return Future<void>(); }, {.executor = Executor::threads(1)});
  registerFunction("emptyInTask", []() -> Task<void> { co_await Future<void>(); });
  Group group(2);
  for (const auto* function : {"emptyVoid", "emptyInt", "emptyOnThreads", "emptyInTask"}) {
    for (const auto& use : std::vector<std::function<void()>>{
             [&] { group[0].call(1, function); }, [&] { group[0].call(0, function); },
             [&] { group[0].remote<int>(1, function).toHere(); }}) {
      const auto error = errorOf(use);
      CHECK(error.code() == ErrorCode::kInvalidArgument);
      CHECK_THAT(error.text(), Catch::Contains("has not been assigned") && Catch::Contains(function));
    }
  }
  const auto ready = Future<int>::of(1);
  CHECK(errorOf([&] { ready.then([](int) { return Future<void>(); }).wait(); }).code() == ErrorCode::kInvalidArgument);
  group.shutdown();
}

TEST_CASE("a continuation takes the value, and an error passes it by") {
  Group group(2);
  std::atomic<int> runs{0};
  const auto next = [&](int x) { return ++runs, x * 10; };
  CHECK(group[0].callAsync(1, &increment, 1).then(next).wait() == 20);
  const auto failed = group[0].callAsync(1, &refuse, "why not").then(next);
  CHECK_THAT(errorOf([&] { failed.wait(); }).text(), Catch::Contains("why not"));
  CHECK(runs == 1);
}

TEST_CASE("then() of a function that returns a future is ready with that") {
  Group group(2);
  const auto& node = group[0];
  const Future<int> chain =
      node.callAsync(1, &increment, 1).then([&](int x) { return node.callAsync(1, &increment, x); });
  CHECK(chain.wait() == 3);
  const auto failed = chain.then([&](int) { return node.callAsync(1, &refuse, "inner"); });
  CHECK_THAT(errorOf([&] { failed.wait(); }).text(), Catch::Contains("inner"));
  const auto invalid = chain.then([](int) { return Future<int>(); });
  CHECK(errorOf([&] { invalid.wait(); }).code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("thenError() replaces an error by a value, a future or another error") {
  Group group(2);
  const auto& node = group[0];
  const auto failed = node.callAsync(1, &refuse, "first");
  CHECK(failed.thenError([](const Error& error) { return static_cast<int>(error.text().size()); }).wait() > 0);
  CHECK(failed.thenError([&](const Error&) { return node.callAsync(1, &increment, 1); }).wait() == 2);
  const auto other = failed.thenError([](const Error&) -> int { throw std::logic_error("second"); });
  CHECK_THROWS_AS(other.wait(), std::logic_error);
  // An Error is not what this one has.
  CHECK_THROWS_AS(other.thenError([](const Error&) { return 1; }).wait(), std::logic_error);
  CHECK(other.thenError([](std::exception_ptr) { return 1; }).wait() == 1);
  CHECK(failed.thenError([](std::exception_ptr) { return 2; }).wait() == 2);
  CHECK(node.callAsync(1, &increment, 1).thenError([](const Error&) { return 0; }).wait() == 2);
  bool handled = false;
  node.callAsync<void>(1, "refuse", "third").thenError([&](const Error&) { handled = true; }).wait();
  CHECK(handled);
}

TEST_CASE("a promise settles a future, once, or fails it when it is dropped") {
  Group group(2);
  const Promise<int> promise;
  registerFunction("promised", [promise] { return promise.future(); });
  const auto call = group[0].callAsync<int>(1, "promised");
  CHECK_FALSE(promise.future().ready());
  promise.set(5);
  promise.set(6);
  promise.fail(Error(ErrorCode::kUnknown, "too late"));
  CHECK(call.wait() == 5);
  const auto dropped = Promise<void>().future();
  CHECK(errorOf([&] { dropped.wait(); }).code() == ErrorCode::kShutdown);
  const Promise<void> failing;
  failing.fail(Error(ErrorCode::kUnknown, "on purpose"));
  CHECK_THAT(errorOf([&] { failing.future().wait(); }).text(), Catch::Contains("on purpose"));
}

TEST_CASE("whenAll() has all values in order, and fails with the first error") {
  Group group(2);
  const auto& node = group[0];
  std::vector<Future<int>> futures;
  for (int i = 0; i < 20; ++i) futures.push_back(node.callAsync(i % 2, &increment, i));
  const auto values = whenAll(futures).wait();
  REQUIRE(values.size() == 20);
  for (int i = 0; i < 20; ++i) CHECK(values[i] == i + 1);

  const auto gate = gateOf("whenAllGate");
  const auto blocked = node.callAsync<void>(1, "whenAllGate");
  const auto failed = whenAll(blocked, node.callAsync(1, &refuse, "one of them"));
  CHECK_THAT(errorOf([&] { failed.wait(); }).text(), Catch::Contains("one of them"));
  CHECK_FALSE(blocked.ready());
  gate->release.count_down();

  const auto [nothing, number, text] =
      whenAll(blocked, node.callAsync(1, &increment, 1), Future<std::string>::of("text")).wait();
  static_assert(std::is_same_v<decltype(nothing), const std::monostate>);
  CHECK(number == 2);
  CHECK(text == "text");
  CHECK(whenAll(std::vector<Future<int>>{}).wait().empty());
  CHECK_NOTHROW(whenAll(std::vector<Future<void>>{blocked, Future<void>::of()}).wait());
}

TEST_CASE("whenAny() has the index of the first, whether it has a value or an error") {
  Group group(2);
  const auto& node = group[0];
  const auto gate = gateOf("whenAnyGate");
  const auto blocked = node.callAsync<void>(1, "whenAnyGate");
  CHECK(whenAny(blocked, node.callAsync(1, &increment, 1)).wait() == 1);
  CHECK(whenAny(std::vector<Future<int>>{node.callAsync(1, &refuse, "no")}).wait() == 0);
  CHECK(errorOf([] { whenAny(std::vector<Future<int>>{}); }).code() == ErrorCode::kInvalidArgument);
  gate->release.count_down();
  CHECK(whenAny(blocked).wait() == 0);
}

TEST_CASE("a continuation runs on the executor that it is given") {
  Group group(2);
  const auto gate = gateOf("executorGate");
  const auto future = group[0].callAsync<void>(1, "executorGate");

  std::mutex mutex;
  std::deque<std::function<void()>> queue;
  const Executor own([&](std::function<void()> task) {
    const std::lock_guard lock(mutex);
    queue.push_back(std::move(task));
  });
  const auto here = future.then(own, [] { return std::this_thread::get_id() == std::thread::id() ? 0 : 1; });
  std::atomic<bool> ran{false};
  const auto inlined = future.then(Executor::inlined(), [&] { ran = true; });
  gate->release.count_down();
  inlined.wait();
  CHECK(ran);
  CHECK(test::eventually([&] {
    const std::lock_guard lock(mutex);
    return !queue.empty();
  }));
  CHECK_FALSE(here.ready());
  queue.front()();
  CHECK(here.wait() == 1);
  // A future that is ready runs it on the thread that adds it.
  const auto thread = std::this_thread::get_id();
  std::thread::id ran_on;
  future.then(Executor::inlined(), [&] { ran_on = std::this_thread::get_id(); });
  CHECK(ran_on == thread);

  const auto dropped = future.then(Executor([](const std::function<void()>&) {}), [] { return 1; });
  CHECK(errorOf([&] { dropped.wait(); }).code() == ErrorCode::kShutdown);
  const auto thrown = future.then(Executor([](auto) { throw std::runtime_error("full"); }), [] { return 1; });
  CHECK(errorOf([&] { thrown.wait(); }).code() == ErrorCode::kShutdown);
}

TEST_CASE("an inline continuation may not wait for what its own thread would receive") {
  Group group(2);
  const auto gate = gateOf("inlineGate");
  const auto never = gateOf("inlineNever");
  const auto future = group[0].callAsync<void>(1, "inlineGate");
  const auto other = group[0].callAsync<void>(1, "inlineNever");
  const auto waits = future.then(Executor::inlined(), [other] { other.wait(); });
  gate->arrived.wait();
  gate->release.count_down();
  const auto error = errorOf([&] { waits.wait(); });
  CHECK(error.code() == ErrorCode::kInvalidArgument);
  CHECK_THAT(error.text(), Catch::Contains("Executor::inlined()"));
  never->release.count_down();
}
