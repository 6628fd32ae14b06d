// Backward passes whose messages fail, are late or come twice, and passes that share a context and its graph.

#include <future>

#include "autograd/autograd_group.h"

using namespace torchrpc;
using namespace torchrpc::test;
using Catch::Matchers::Contains;
using namespace std::chrono_literals;

namespace {

/// What happens to the frames of one kind, as often as the test says, after some that are spared.
class Faults {
 public:
  Faults(Kind kind, Fault fault, int times, int spared = 0)
      : kind_(kind), fault_(fault), spared_(spared), left_(times) {}
  FaultPolicy policy() {
    return [this](const FrameInfo& frame, const std::string&) {
      if (frame.kind != kind_ || spared_.fetch_sub(1) > 0) return Fault{};
      return left_.fetch_sub(1) > 0 ? fault_ : Fault{};
    };
  }

 private:
  const Kind kind_;
  const Fault fault_;
  std::atomic<int> spared_;
  std::atomic<int> left_;
};

/// A chain of calls through three workers that SMART has to mark: worker 1 calls worker 2 for what it returns.
AutogradWorker::Functions functions() {
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

bool quiet(AutogradGroup& group) {
  return eventually([&] { return group.passes() == 0; });
}

}  // namespace

TEST_CASE("a message of a pass that does not go out fails the pass everywhere, and the next one works") {
  // Gradients go out and further on. (They come back with the answers, which do come or the connection is lost.)
  const auto [kind, spared] = GENERATE(
      std::pair(Kind::kAutogradMark, 0), std::pair(Kind::kAutogradGradients, 0),
      std::pair(Kind::kAutogradGradients, 1));
  CAPTURE(spared);
  Faults faults(kind, {Fault::Action::kFail}, 1, spared);
  AutogradGroup group(3, functions(), {.faults = faults.policy()});
  const OwnContext context(group[0]);
  const auto x = leaf(1);
  const auto loss = group[0].callOne(1, "pass on", {x}).sum();
  const auto backward = [&] {
    group[0].autograd().backward(context.id(), {loss}, /*retain_graph=*/true, BackwardMode::kSmart);
  };
  CHECK(errorOf(backward).code() == ErrorCode::kWorkerLost);
  CHECK(quiet(group));
  CHECK_FALSE(gradientOf(group[0], context.id(), x).defined());
  backward();
  CHECK(holds(gradientOf(group[0], context.id(), x), 12));
  CHECK(quiet(group));
}

TEST_CASE("gradients that go home past the worker that has begun the work, and do not go out, fail the pass") {
  at::Tensor kept;
  const AutogradWorker::Functions keeping{
      {"keep", [&kept](AutogradWorker&, Tensors args) -> Tensors { return {kept = args.at(0) * 3}; }},
      {"kept", [&kept](AutogradWorker&, Tensors) -> Tensors { return {kept}; }},
      {"fetch", [](AutogradWorker& here, Tensors) -> Tensors { return {here.callOne(1, "kept", {}) * 2}; }},
  };
  Faults faults(Kind::kAutogradGradients, {Fault::Action::kFail}, 1, /*spared=*/2);
  AutogradGroup group(3, keeping, {.faults = faults.policy()});
  const auto mode = BackwardMode::kSmart;  // "keep" has a result that nobody uses
  const OwnContext context(group[0]);
  const auto x = leaf(1);
  static_cast<void>(group[0].callOne(1, "keep", {x}));
  const auto loss = group[0].callOne(2, "fetch", {at::ones({2})}).sum();
  const auto backward = [&] { group[0].autograd().backward(context.id(), {loss}, /*retain_graph=*/true, mode); };
  CHECK(errorOf(backward).code() == ErrorCode::kWorkerLost);
  CHECK(quiet(group));
  CHECK_FALSE(gradientOf(group[0], context.id(), x).defined());
  backward();
  CHECK(holds(gradientOf(group[0], context.id(), x), 6));
  CHECK(quiet(group));
}

TEST_CASE("an abort that does not go out is sent again") {
  Faults faults(Kind::kAutogradAbort, {Fault::Action::kFail}, 3);
  AutogradGroup group(3, functions(), {.faults = faults.policy()});
  const auto mode = GENERATE(BackwardMode::kFast, BackwardMode::kSmart);
  const OwnContext context(group[0]);
  const auto x = leaf(1);
  // What worker 2 has marked for the second one waits for it, or is told.
  const auto y = group[0].callOne(1, "pass on and throw", {x}), z = group[0].callOne(2, "triple", {y});
  const auto error = errorOf([&] { group[0].autograd().backward(context.id(), {(y + z).sum()}, false, mode); });
  CHECK(error.text() == "Error on Node 2: broken on purpose");
  CHECK(quiet(group));
}

TEST_CASE("replies and gradients that overtake each other change nothing") {
  const auto kind = GENERATE(Kind::kReply, Kind::kAutogradGradients, Kind::kAutogradMark);
  Faults faults(kind, {.delay = 3ms}, 4);
  AutogradGroup group(3, functions(), {.faults = faults.policy()});
  const auto mode = GENERATE(BackwardMode::kFast, BackwardMode::kSmart);
  const OwnContext context(group[0]);
  const auto x = leaf(1);
  const auto y = group[0].callOne(1, "pass on", {x}) + group[0].callOne(2, "triple", {x});
  group[0].autograd().backward(context.id(), {y.sum()}, false, mode);
  CHECK(holds(gradientOf(group[0], context.id(), x), 15));
  CHECK(quiet(group));
}

TEST_CASE("passes at once over one context and graph add up") {
  AutogradGroup group(3, functions());
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
  CHECK(quiet(group));
}

TEST_CASE("a pass that fails again and again leaves no thread and no pass behind") {
  AutogradGroup group(3, functions());
  const auto mode = GENERATE(BackwardMode::kFast, BackwardMode::kSmart);
  const OwnContext context(group[0]);
  const auto loss = group[0].callOne(1, "pass on and throw", {leaf(1)}).sum();
  for (int round = 0; round < 50; ++round) {
    const auto error = errorOf([&] { group[0].autograd().backward(context.id(), {loss}, true, mode); });
    REQUIRE(error.text() == "Error on Node 2: broken on purpose");
  }
  CHECK(quiet(group));
  for (int id = 0; id < 3; ++id) {
    CHECK(eventually([&] { return group.agent(id).metrics().at("agent.num_pending_calls") == "0"; }));
    CHECK(eventually([&] { return std::stoi(group.agent(id).metrics().at("agent.num_threads")) <= 4; }));
  }
}
