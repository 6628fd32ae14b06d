// Optimizers on several workers: which parameters are stepped, with which options, and how long optimizers live.

#include "optim/distributed_optimizer.h"

#include <thread>

#include "optim/optim_group.h"

using namespace torchrpc;
using namespace torchrpc::test;
using Catch::Matchers::Contains;

namespace {

constexpr int64_t kContext = 7;
using Groups = std::vector<DistributedOptimizer::Group>;

bool holds(const at::Tensor& tensor, double value) { return tensor.detach().allclose(at::full({2}, value)); }

/// Each of the parameters gets a gradient of ones in kContext on its owner; worker 0 knows the context.
void setOnes(OptimGroup& group, const std::vector<std::pair<int, at::Tensor>>& params) {
  std::map<int, OptimService::GradientList> lists{{0, {}}};
  for (const auto& [owner, param] : params) lists[owner].emplace_back(param, at::ones({2}));
  for (auto& [owner, list] : lists) group[owner].setGradients(kContext, std::move(list));
}

}  // namespace

TEST_CASE("parameters are stepped on all their owners, including this worker") {
  OptimGroup group(3);
  const auto a = parameter(1), b = parameter(2), c = parameter(3);
  setOnes(group, {{0, a}, {1, b}, {2, c}});
  DistributedOptimizer optimizer(
      group[0].optim(), "SGD",
      Groups{{{group.give(1, b), group.give(0, a)}, {{"lr", 0.5}}}, {{group.give(2, c)}, {{"lr", 1}}}}, {});
  optimizer.step(kContext);
  CHECK(holds(a, 0.5));
  CHECK(holds(b, 1.5));
  CHECK(holds(c, 2));
  CHECK(optimizer.remoteOptimizers().size() == 3);
}

TEST_CASE("a parameter without a gradient does not change, nor do those of an owner that the context has not reached") {
  OptimGroup group(3);
  const auto a = parameter(1), b = parameter(2), c = parameter(3);
  setOnes(group, {{1, a}});
  DistributedOptimizer optimizer(
      group[0].optim(), "Adam", Groups{{{group.give(1, a), group.give(1, b), group.give(2, c)}, {}}}, {});
  optimizer.step(kContext);
  CHECK_FALSE(holds(a, 1));
  CHECK(holds(b, 2));
  CHECK(holds(c, 3));
  const auto states = optimizer.state();
  REQUIRE(states.size() == 3);
  CHECK(states[0].size() == 3);
  CHECK(states[1].empty());
}

TEST_CASE("a context that the client does not have is an error, and no message is sent") {
  OptimGroup group(2);
  const auto a = parameter(1);
  DistributedOptimizer optimizer(group[0].optim(), "SGD", Groups{{{group.give(1, a)}, {}}}, {});
  group[1].setGradients(8, {{a, at::ones({2})}});
  const auto error = errorOf([&] { optimizer.step(8); });
  CHECK(error.text() == "Could not find autograd context with id: 8");
  CHECK(holds(a, 1));
}

TEST_CASE("changed options are sent with the next step, and late older ones have no effect") {
  OptimGroup group(2);
  const auto a = parameter(0);
  setOnes(group, {{1, a}});
  DistributedOptimizer optimizer(group[0].optim(), "SGD", Groups{{{group.give(1, a)}, {{"lr", 1.0}}}}, {});
  optimizer.step(kContext);
  CHECK(holds(a, -1));
  optimizer.setOptions({{{"lr", 2.0}}});
  CHECK(holds(a, -1));
  optimizer.step(kContext);
  CHECK(holds(a, -3));
  const auto rref = optimizer.remoteOptimizers().front();
  const OptimStep late{OptimService::nameOf(*rref), kContext, /*revision=*/1, {{{"lr", 100.0}}}};
  REQUIRE(group.request(1, encode(late)).ok());
  CHECK(holds(a, -5));
  CHECK_THAT(errorOf([&] { optimizer.setOptions({}); }).text(), Contains("options of 0"));
  CHECK_THAT(errorOf([&] { optimizer.setOptions({{{"rate", 1.0}}}); }).text(), Contains("no option 'rate'"));
}

TEST_CASE("states are loaded and returned in the order in which the parameters were given") {
  OptimGroup group(3);
  const auto a = parameter(0), b = parameter(0), c = parameter(0);
  setOnes(group, {{1, a}, {2, b}, {1, c}});
  const std::vector<RRefPtr> params{group.give(1, a), group.give(2, b), group.give(1, c)};
  DistributedOptimizer optimizer(group[0].optim(), "SGD", Groups{{params, {{"lr", 1.0}, {"momentum", 0.5}}}}, {});
  std::vector<ParamState> states;
  for (const double value : {1, 2, 3}) states.push_back({{"momentum_buffer", at::full({2}, value)}});
  optimizer.load(states);
  const auto back = optimizer.state();
  for (const size_t i : {0, 1, 2}) CHECK(holds(back.at(i).at("momentum_buffer"), static_cast<double>(i) + 1));
  optimizer.step(kContext);
  CHECK(holds(a, -1.5));
  CHECK(holds(b, -2));
  CHECK(holds(c, -2.5));
  CHECK_THAT(errorOf([&] { optimizer.load({}); }).text(), Contains("there are 3 parameters, but states of 0"));
}

TEST_CASE("an optimizer is created when its last parameter is ready") {
  OptimGroup group(2);
  const auto late = group[1].rrefs().createOwner();
  const auto rref = group.give(late);
  std::promise<Result<RRefPtr>> created;
  group[0].optim().create(
      rref->owner(), {.kind = "SGD", .groups = {{1, {}}}}, {rref}, std::chrono::seconds(20),
      [&](Result<RRefPtr> result) { created.set_value(std::move(result)); });
  auto future = created.get_future();
  // The owner has received the request once it has replied to a later one, which does not wait.
  CHECK_FALSE(group.request(1, encodeOptimState("?")).ok());
  CHECK(future.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
  late->setValue(parameter(1));
  CHECK(future.get().ok());
}

TEST_CASE("errors name the owner") {
  OptimGroup group(2);
  const auto make = [&](RRefPtr param, const Options& options = {}, const char* kind = "SGD") {
    return errorOf([&] { DistributedOptimizer(group[0].optim(), kind, Groups{{{param}, options}}, {}); }).text();
  };
  const auto good = group.give(1, parameter(1));
  CHECK_THAT(make(group.give(1, "text")), Contains("creation of the optimizer on worker1") && Contains("type String"));
  CHECK_THAT(make(group.give(1, parameter(1) * 2)), Contains("worker1") && Contains("non-leaf"));
  CHECK_THAT(make(nullptr), Contains("parameter 0 is no RRef"));
  CHECK_THAT(make(good, {{"lr", -1.0}}), Contains("Invalid learning rate: -1"));
  CHECK_THAT(make(good, {}, "Newton"), Contains("no optimizer named 'Newton'"));
  CHECK_THAT(
      errorOf([&] { DistributedOptimizer(group[0].optim(), "SGD", Groups{{{good, good}, {}}}, {}); }).text(),
      Contains("appear twice"));
  CHECK_THAT(
      errorOf([&] { DistributedOptimizer(group[0].optim(), "SGD", Groups{{{}, {}}}, {}); }).text(),
      Contains("empty parameter list"));
  const auto failed = group[1].rrefs().createOwner();
  failed->setError(Error(ErrorCode::kUserException, "its maker threw"));
  CHECK_THAT(make(group.give(failed)), Contains("its maker threw"));
}

TEST_CASE("a gradient that an algorithm rejects is an error of the step, and the other owners have stepped") {
  OptimGroup group(3);
  const auto a = parameter(0), b = parameter(0);
  setOnes(group, {{1, a}, {2, b}});
  group[1].setGradients(kContext, {{a, at::ones({2}).to_sparse()}});
  DistributedOptimizer optimizer(group[0].optim(), "Adam", Groups{{{group.give(1, a), group.give(2, b)}, {}}}, {});
  const auto error = errorOf([&] { optimizer.step(kContext); });
  CHECK_THAT(error.text(), Contains("worker1") && Contains("does not support sparse gradients"));
  CHECK(error.worker() == "worker1");
  CHECK_FALSE(holds(b, 0));
}

TEST_CASE("an optimizer keeps its parameters alive, and is destroyed when its client releases it") {
  TrackedParameter tracked;
  OptimGroup group(2);
  auto optimizer = std::make_unique<DistributedOptimizer>(
      group[0].optim(), "SGD", Groups{{{group.give(1, tracked.make())}, {}}}, DistributedOptimizer::Settings{});
  group[0].setGradients(kContext, {});
  optimizer->step(kContext);
  optimizer.reset();
  CHECK(tracked.waitDestroyed());
}

TEST_CASE("an optimizer is destroyed when its client is lost") {
  TrackedParameter tracked;
  OptimGroup group(2);
  DistributedOptimizer optimizer(group[0].optim(), "SGD", Groups{{{group.give(1, tracked.make())}, {}}}, {});
  group.agent(0).close();
  CHECK(tracked.waitDestroyed());
}

TEST_CASE("the error for a lost owner names it") {
  OptimGroup group(2);
  DistributedOptimizer optimizer(group[0].optim(), "SGD", Groups{{{group.give(1, parameter(1))}, {}}}, {});
  group[0].setGradients(kContext, {});
  group.agent(1).close();
  const auto error = errorOf([&] { optimizer.step(kContext); });
  CHECK(error.code() == ErrorCode::kWorkerLost);
  CHECK_THAT(error.text(), Contains("step of the optimizer on worker1"));
}

TEST_CASE("steps of several trainers on one parameter lose no update unless they are lock-free") {
  OptimGroup group(2);
  const auto shared = parameter(0);
  setOnes(group, {{1, shared}});
  const bool lock_free = GENERATE(false, true);
  std::vector<std::unique_ptr<DistributedOptimizer>> optimizers;
  for (int i = 0; i < 3; ++i) {
    optimizers.push_back(std::make_unique<DistributedOptimizer>(
        group[0].optim(), "SGD", Groups{{{group.give(1, shared)}, {{"lr", 1.0}}}},
        DistributedOptimizer::Settings{.lock_free = lock_free}));
  }
  const auto version = shared._version();
  std::vector<std::thread> trainers;
  for (auto& optimizer : optimizers) {
    trainers.emplace_back([&] {
      for (int step = 0; step < 20; ++step) optimizer->step(kContext);
    });
  }
  for (auto& trainer : trainers) trainer.join();
  if (lock_free) {
    CHECK(shared.detach().lt(-1).all().item<bool>());
    CHECK(shared._version() == version);
  } else {
    CHECK(holds(shared, -60));
    CHECK(shared._version() == version + 60);
  }
}
