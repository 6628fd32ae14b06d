// Coroutines of the public API.

#include "torchrpc/task.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <atomic>
#include <latch>
#include <memory>
#include <stdexcept>
#include <thread>

#include "api/group.h"
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
    while (!call.cancelled() && !gates->release.try_wait()) std::this_thread::sleep_for(1ms);
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
  const auto end = std::chrono::steady_clock::now() + 20s;
  while (gates->cleaned_up == 0 && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
  CHECK(gates->cleaned_up == -2);
  group.shutdown();
  CHECK(gates->cancelled == 1);
  gates->release.count_down();
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
