// Coroutines of the public API.

#include "torchrpc/task.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <atomic>
#include <latch>
#include <memory>
#include <stdexcept>

#include "api/group.h"
#include "outcomes.h"
#include "torchrpc/autograd.h"
#include "torchrpc/function.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

int twiceOf(int x) { return 2 * x; }
TORCHRPC_FUNCTION(twiceOf);
at::Tensor twiceTensor(const at::Tensor& x) { return x * 2; }
TORCHRPC_FUNCTION(twiceTensor);

/// Its parameters are references: they live as long as the task.
Task<std::string> describe(const Call& call, const std::string& text, const std::vector<int>& numbers) {
  int sum = 0;
  for (const int number : numbers) sum += co_await call.node.callAsync(1 - call.node.self().id, &twiceOf, number);
  co_return text + " " + std::to_string(sum) + " of " + call.caller.name;
}
TORCHRPC_FUNCTION(describe);

Task<int> failingTask(const Call& call, int x) {
  const int twice = co_await call.node.callAsync(1 - call.node.self().id, &twiceOf, x);
  if (twice > 0) throw std::runtime_error("a task fails with " + std::to_string(twice));
  co_return twice;
}
TORCHRPC_FUNCTION(failingTask);

Task<int> sumTo(NodeRef node, int n) {
  if (n == 0) co_return 0;
  const int rest = co_await sumTo(node, n - 1);
  co_return rest + co_await node.callAsync(1, &twiceOf, n) / 2;
}
Task<void> nothing() { co_return; }
Task<std::unique_ptr<int>> moveOnly() { co_return std::make_unique<int>(3); }
Task<int> throwsAtOnce() {
  throw std::logic_error("at once");
  co_return 0;
}

/// A latch to which a coroutine gets, and one that its call on the other worker waits for.
struct Gates {
  std::latch inner_arrived{1};
  std::latch release{1};
  std::atomic<int> cancelled{0};
  std::atomic<int> cleaned_up{0};
};

}  // namespace

TEST_CASE("a function that returns a task answers when the task ends") {
  Group group(2);
  CHECK(group[0].call(1, &describe, "sum", std::vector{1, 2, 3}) == "sum 12 of worker0");
  CHECK(
      group[0].call(0, &describe, std::string(100, 'x'), std::vector<int>{}) ==
      std::string(100, 'x') + " 0 of worker0");
  const auto error = errorOf([&] { group[0].call(1, &failingTask, 4); });
  CHECK(error.code() == ErrorCode::kUserException);
  CHECK_THAT(error.text(), Catch::Contains("a task fails with 8") && Catch::Contains("failingTask"));
  CHECK(error.worker() == "worker1");
  group.shutdown();
}

TEST_CASE("tasks wait for futures and for other tasks") {
  Group group(2);
  CHECK(sumTo(group[0], 50).start().wait() == 1275);
  CHECK(sumTo(group[0], 3).start(group[0]).then([](int sum) { return sum + 1; }).wait() == 7);
  CHECK_NOTHROW(nothing().start().wait());
  CHECK_THROWS_AS(throwsAtOnce().start().wait(), std::logic_error);
  const auto taken = [](Task<std::unique_ptr<int>> task) -> Task<int> {
    const auto value = co_await std::move(task);
    co_return *value;
  };
  CHECK(taken(moveOnly()).start().wait() == 3);
}

TEST_CASE("a task that was awaited, started or moved from is refused") {
  const auto twice = [](Task<std::unique_ptr<int>> task) -> Task<bool> {
    const auto value = co_await std::move(task);
    const auto error = co_await [](Task<std::unique_ptr<int>>& used) -> Task<ErrorCode> {
      try {
        co_await std::move(used);
      } catch (const Error& refused) {
        co_return refused.code();
      }
      co_return ErrorCode::kUnknown;
    }(task);
    co_return *value == 3 && error == ErrorCode::kInvalidArgument;
  };
  CHECK(twice(moveOnly()).start().wait());
  auto task = nothing();
  std::move(task).start().wait();
  CHECK(errorOf([&] { std::move(task).start(); }).code() == ErrorCode::kInvalidArgument);  // NOLINT: used after a move
  const auto moved = std::move(task);
  CHECK(errorOf([&] { std::move(task).start(); }).code() == ErrorCode::kInvalidArgument);  // NOLINT: used after a move
}

TEST_CASE("a task that is destroyed before it begins does nothing") {
  auto object = std::make_shared<int>(1);
  {
    const auto task = [](std::shared_ptr<int> held) -> Task<int> { co_return ++*held; }(object);
    CHECK(object.use_count() == 2);
  }
  CHECK(object.use_count() == 1);
  CHECK(*object == 1);
}

TEST_CASE("tasks that wait occupy no thread") {
  constexpr int kTasks = 200;
  Group group(2, [](NodeOptions& options) { options.threads = 1; });
  const auto arrived = std::make_shared<std::latch>(kTasks);
  const Promise<int> held;
  registerFunction("heldOpen", [held] { return held.future(); });
  registerFunction("waitsInTask", [arrived](const Call& call) -> Task<int> {
    arrived->count_down();
    co_return 2 * co_await call.node.callAsync<int>(0, "heldOpen");
  });
  std::vector<Future<int>> futures;
  for (int i = 0; i < kTasks; ++i) futures.push_back(group[0].callAsync<int>(1, "waitsInTask"));
  arrived->wait();  // all of them, although the one thread has begun each
  CHECK(std::stoi(group[1].metrics().at("agent.num_threads")) < 10);
  held.set(1);
  for (const int value : whenAll(futures).wait()) CHECK(value == 2);
  group.shutdown();
}

namespace {

// What compilers do without optimization; the test programs may be optimized.
#if defined(__clang__)
#define NOT_OPTIMIZED __attribute__((optnone))
#else
#define NOT_OPTIMIZED __attribute__((optimize("O0")))
#endif

NOT_OPTIMIZED Task<int> readyValue(int x) { co_return co_await Future<int>::of(x); }
NOT_OPTIMIZED Task<int> failsAtOnce(int x) {
  if (x >= 0) throw std::logic_error("each time");
  co_return x;
}
NOT_OPTIMIZED Task<int64_t> sumOfReady(int count) {
  int64_t sum = 0;
  for (int i = 0; i < count; ++i) {
    sum += co_await Future<int>::of(1);
    sum += co_await readyValue(1);
    try {
      sum += co_await failsAtOnce(i);
    } catch (const std::logic_error&) {
      ++sum;
    }
  }
  co_return sum;
}
NOT_OPTIMIZED Task<int64_t> sumOfCalls(NodeRef node, int count) {
  int64_t sum = 0;
  for (int i = 0; i < count; ++i) {
    sum += co_await [](NodeRef callee) -> Task<int> { co_return co_await callee.callAsync(0, &twiceOf, 1); }(node);
  }
  co_return sum;
}

}  // namespace

TEST_CASE("a coroutine may await any number of ready futures and tasks, also without optimization") {
  CHECK(sumOfReady(100'000).start().wait() == 300'000);
  Group group(1);
  CHECK(sumOfCalls(group[0], 5'000).start(group[0]).wait() == 10'000);
  group.shutdown();
}

TEST_CASE("tasks that end on other threads while they are begun continue the coroutine that awaits them, once") {
  const auto threads = Executor::threads(2);
  const auto sum = [](Executor elsewhere) -> Task<int> {
    int total = 0;
    for (int i = 0; i < 20'000; ++i) {
      total += co_await [](const Executor& other) -> Task<int> {
        co_return co_await Future<int>::of(1).then(other, [](int x) { return x; });
      }(elsewhere);
    }
    co_return total;
  };
  CHECK(sum(threads).start().wait(60s) == 20'000);
}

TEST_CASE("a task keeps its thread state, and its thread gets its own back") {
  Group group(2);
  const auto modes = [](NodeRef node) -> Task<std::pair<bool, bool>> {
    const at::AutoGradMode off(false);
    const bool before = at::GradMode::is_enabled();
    co_await node.callAsync(1, &twiceOf, 1);
    co_return std::pair(before, at::GradMode::is_enabled());
  };
  const auto future = modes(group[0]).start();
  CHECK(at::GradMode::is_enabled());
  CHECK(future.wait() == std::pair(false, false));
  CHECK(at::GradMode::is_enabled());

  AutogradContext context(group[0]);
  const auto x = at::ones({2}).set_requires_grad(true);
  const auto recorded = [](NodeRef node, at::Tensor x) -> Task<at::Tensor> {
    const auto once = co_await node.callAsync(1, &twiceTensor, x);
    co_return co_await node.callAsync(1, &twiceTensor, once);  // made on another thread
  };
  context.backward({recorded(group[0], x).start().wait().sum()});
  CHECK(context.gradient(x).equal(at::full({2}, 4.0)));
}

TEST_CASE("a cancelled call cancels what the task waits for; the task cleans up") {
  Group group(2);
  const auto gates = std::make_shared<Gates>();
  registerFunction("innerOfTask", [gates](const Call& call) {
    gates->inner_arrived.count_down();
    test::eventually([&] { return call.cancelled() || gates->release.try_wait(); });
    if (call.cancelled()) ++gates->cancelled;
  });
  registerFunction("cancelledTask", [gates](const Call& call) -> Task<int> {
    int result = 1;
    try {
      co_await call.node.callAsync<void>(0, "innerOfTask");
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kCancelled) result = -1;
    }
    result *= co_await call.node.callAsync(0, &twiceOf, 1);  // its cleaning up is not cancelled
    gates->cleaned_up = result;
    co_return result;
  });
  const auto future = group[0].callAsync<int>(1, "cancelledTask");
  gates->inner_arrived.wait();
  CHECK(future.cancel());
  CHECK(test::eventually([&] { return gates->cleaned_up != 0; }));
  CHECK(gates->cleaned_up == -2);
  group.shutdown();
  CHECK(gates->cancelled == 1);
  gates->release.count_down();
}

TEST_CASE("a cancelled call makes one co_await of its task throw, whatever the task does at that moment") {
  const bool has_waited = GENERATE(true, false);
  std::atomic<int> arrived{0}, cleaned_up{0};
  Group group(2);
  registerFunction("innerAtAnyMoment", [&](const Call& call) {
    ++arrived;
    test::eventually([&] { return call.cancelled(); });
  });
  registerFunction("cancelledAtAnyMoment", [&](const Call& call) -> Task<int> {
    int result = 1;
    try {
      const auto inner = call.node.callAsync<void>(0, "innerAtAnyMoment");
      if (!has_waited) test::eventually([&] { return call.cancelled() && inner.ready(); });
      co_await inner;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kCancelled) result = -1;
    }
    for (int i = 0; i < 3; ++i) co_await call.node.callAsync(0, &twiceOf, 1);
    cleaned_up = result;
    co_return result;
  });
  for (int round = 0; round < 500; ++round) {
    arrived = cleaned_up = 0;
    const auto future = group[0].callAsync<int>(1, "cancelledAtAnyMoment");
    REQUIRE(test::eventually([&] { return arrived == 1; }));
    REQUIRE(future.cancel());
    REQUIRE(test::eventually([&] { return cleaned_up != 0; }));
    REQUIRE(cleaned_up == -1);
  }
  group.shutdown();
  unregisterFunction("innerAtAnyMoment");
  unregisterFunction("cancelledAtAnyMoment");
}

TEST_CASE("cancelling the future of a task cancels the call at which it waits") {
  Group group(2);
  const auto gates = std::make_shared<Gates>();
  registerFunction("gateOfTask", [gates] {
    gates->inner_arrived.count_down();
    gates->release.wait();
  });
  const auto task = [](NodeRef node) -> Task<int> {
    co_await node.callAsync<void>(1, "gateOfTask");
    co_return 1;
  };
  const auto future = task(group[0]).start();
  gates->inner_arrived.wait();
  CHECK(future.cancel());
  CHECK(errorOf([&] { future.wait(); }).code() == ErrorCode::kCancelled);
  gates->release.count_down();
}

TEST_CASE("the end of a node ends the tasks that wait") {
  Group group(2);
  const auto gates = std::make_shared<Gates>();
  registerFunction("gateToTheEnd", [gates] {
    gates->inner_arrived.count_down();
    gates->release.wait();
  });
  const auto task = [](NodeRef node) -> Task<int> {
    co_await node.callAsync<void>(1, "gateToTheEnd");
    co_return 1;
  };
  const auto future = task(group[0]).start();
  gates->inner_arrived.wait();
  group[0].stop();
  CHECK(errorOf([&] { future.wait(); }).code() == ErrorCode::kShutdown);
  gates->release.count_down();
}
