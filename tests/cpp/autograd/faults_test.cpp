// Backward passes whose messages fail or are delayed, and passes that share a context and its graph.

#include <future>

#include "autograd/autograd_group.h"

using namespace torchrpc;
using namespace torchrpc::test;
using Catch::Matchers::Contains;
using namespace std::chrono_literals;

namespace {

/// Applies a fault to `times` frames of one kind, after `skipped` frames of that kind.
class Faults {
 public:
  Faults(Kind kind, Fault fault, int times, int skipped = 0)
      : kind_(kind), fault_(fault), skipped_(skipped), left_(times) {}
  FaultPolicy policy() {
    return [this](const FrameInfo& frame, const std::string&) {
      if (frame.kind != kind_ || skipped_.fetch_sub(1) > 0) return Fault{};
      return left_.fetch_sub(1) > 0 ? fault_ : Fault{};
    };
  }

 private:
  const Kind kind_;
  const Fault fault_;
  std::atomic<int> skipped_;
  std::atomic<int> left_;
};

/// A chain of calls through three workers, for which SMART needs marking: worker 1 calls worker 2 for its result.
AutogradWorker::Functions chainFunctions() {
  return {
      {"triple", [](AutogradWorker&, Tensors args) -> Tensors { return {args.at(0) * 3}; }},
      {"throw backward",
       [](AutogradWorker&, Tensors args) -> Tensors {
         const auto result = args.at(0) * 3;
         result.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("broken on purpose"); });
         return {result};
       }},
      {"pass on",
       [](AutogradWorker& here, Tensors args) -> Tensors { return {here.callOne(2, "triple", {args.at(0) * 2}) * 2}; }},
      {"pass on and throw",
       [](AutogradWorker& here, Tensors args) -> Tensors {
         return {here.callOne(2, "throw backward", {args.at(0) * 2}) * 2};
       }},
  };
}

bool noPassLeft(AutogradGroup& group) {
  return eventually([&] { return group.passes() == 0; });
}

}  // namespace

TEST_CASE("a message of a pass that cannot be sent fails the pass on all workers, and the next pass works") {
  // The first and the second hop of the gradients. (Gradients that return travel with replies, which cannot fail
  // alone.)
  const auto [kind, skipped] = GENERATE(
      std::pair(Kind::kAutogradMark, 0), std::pair(Kind::kAutogradGradients, 0),
      std::pair(Kind::kAutogradGradients, 1));
  CAPTURE(skipped);
  Faults faults(kind, {Fault::Action::kFail}, 1, skipped);
  AutogradGroup group(3, chainFunctions(), {.faults = faults.policy()});
  const OwnContext context(group[0]);
  const auto x = leaf(1);
  const auto loss = group[0].callOne(1, "pass on", {x}).sum();
  const auto backward = [&] {
    group[0].autograd().backward(context.id(), {loss}, /*retain_graph=*/true, BackwardMode::kSmart);
  };
  CHECK(errorOf(backward).code() == ErrorCode::kWorkerLost);
  CHECK(noPassLeft(group));
  CHECK_FALSE(gradientOf(group[0], context.id(), x).defined());
  backward();
  CHECK(holds(gradientOf(group[0], context.id(), x), 12));
  CHECK(noPassLeft(group));
}

TEST_CASE("a pass fails if gradients for the root worker cannot be sent by a worker that another one started") {
  at::Tensor kept;
  const AutogradWorker::Functions keeping{
      {"keep", [&kept](AutogradWorker&, Tensors args) -> Tensors { return {kept = args.at(0) * 3}; }},
      {"kept", [&kept](AutogradWorker&, Tensors) -> Tensors { return {kept}; }},
      {"fetch", [](AutogradWorker& here, Tensors) -> Tensors { return {here.callOne(1, "kept", {}) * 2}; }},
  };
  Faults faults(Kind::kAutogradGradients, {Fault::Action::kFail}, 1, /*skipped=*/2);
  AutogradGroup group(3, keeping, {.faults = faults.policy()});
  const auto mode = BackwardMode::kSmart;  // the result of "keep" is not used
  const OwnContext context(group[0]);
  const auto x = leaf(1);
  static_cast<void>(group[0].callOne(1, "keep", {x}));
  const auto loss = group[0].callOne(2, "fetch", {at::ones({2})}).sum();
  const auto backward = [&] { group[0].autograd().backward(context.id(), {loss}, /*retain_graph=*/true, mode); };
  CHECK(errorOf(backward).code() == ErrorCode::kWorkerLost);
  CHECK(noPassLeft(group));
  CHECK_FALSE(gradientOf(group[0], context.id(), x).defined());
  backward();
  CHECK(holds(gradientOf(group[0], context.id(), x), 6));
  CHECK(noPassLeft(group));
}

TEST_CASE("an abort that cannot be sent is sent again") {
  Faults faults(Kind::kAutogradAbort, {Fault::Action::kFail}, 3);
  AutogradGroup group(3, chainFunctions(), {.faults = faults.policy()});
  const auto mode = GENERATE(BackwardMode::kFast, BackwardMode::kSmart);
  const OwnContext context(group[0]);
  const auto x = leaf(1);
  // Worker 2 also waits for the gradients of the second call, until the abort arrives.
  const auto y = group[0].callOne(1, "pass on and throw", {x}), z = group[0].callOne(2, "triple", {y});
  const auto error = errorOf([&] { group[0].autograd().backward(context.id(), {(y + z).sum()}, false, mode); });
  CHECK(error.text() == "Error on Node 2: broken on purpose");
  CHECK(noPassLeft(group));
}

TEST_CASE("replies, gradients and marks that are reordered do not change the result") {
  const auto kind = GENERATE(Kind::kReply, Kind::kAutogradGradients, Kind::kAutogradMark);
  Faults faults(kind, {.delay = 3ms}, 4);
  AutogradGroup group(3, chainFunctions(), {.faults = faults.policy()});
  const auto mode = GENERATE(BackwardMode::kFast, BackwardMode::kSmart);
  const OwnContext context(group[0]);
  const auto x = leaf(1);
  const auto y = group[0].callOne(1, "pass on", {x}) + group[0].callOne(2, "triple", {x});
  group[0].autograd().backward(context.id(), {y.sum()}, false, mode);
  CHECK(holds(gradientOf(group[0], context.id(), x), 15));
  CHECK(noPassLeft(group));
}

TEST_CASE("concurrent passes over one context and graph add up") {
  AutogradGroup group(3, chainFunctions());
  const auto mode = GENERATE(BackwardMode::kFast, BackwardMode::kSmart);
  const OwnContext context(group[0]);
  const auto x = leaf(1);
  const auto loss = group[0].callOne(1, "pass on", {x * x}).sum();
  std::vector<std::future<void>> passes;
  for (int i = 0; i < 4; ++i) {
    passes.push_back(std::async(std::launch::async, [&] {
      for (int round = 0; round < 5; ++round) {
        group[0].autograd().backward(context.id(), {loss}, /*retain_graph=*/true, mode);
      }
    }));
  }
  for (auto& pass : passes) pass.get();
  CHECK(holds(gradientOf(group[0], context.id(), x), 480));
  CHECK(noPassLeft(group));
}

TEST_CASE("a pass that fails repeatedly leaves no thread and no pass behind") {
  AutogradGroup group(3, chainFunctions());
  const auto mode = GENERATE(BackwardMode::kFast, BackwardMode::kSmart);
  const OwnContext context(group[0]);
  const auto loss = group[0].callOne(1, "pass on and throw", {leaf(1)}).sum();
  for (int round = 0; round < 50; ++round) {
    const auto error = errorOf([&] { group[0].autograd().backward(context.id(), {loss}, true, mode); });
    REQUIRE(error.text() == "Error on Node 2: broken on purpose");
  }
  CHECK(noPassLeft(group));
  for (int id = 0; id < 3; ++id) {
    CHECK(eventually([&] { return group.agent(id).metrics().at("agent.num_pending_calls") == "0"; }));
    CHECK(eventually([&] { return std::stoi(group.agent(id).metrics().at("agent.num_threads")) <= 4; }));
  }
}

TEST_CASE("a worker that counted as lost and lives takes part in passes again, with all gradients") {
  AutogradGroup group(3, chainFunctions());
  group[1].autograd().onWorkerLost(group.agent(0).self());
  group[2].autograd().onWorkerLost(group.agent(0).self());
  {
    const OwnContext context(group[0]);
    const auto x = leaf(1);
    const auto loss = group[0].callOne(1, "pass on", {x}).sum();
    group[0].autograd().backward(context.id(), {loss}, /*retain_graph=*/false, BackwardMode::kSmart);
    CHECK(holds(gradientOf(group[0], context.id(), x), 12));
  }
  CHECK(eventually([&] { return group.contexts() == 0; }));
}
