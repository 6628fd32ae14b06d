// RRefs, distributed autograd and the optimizer through the public API.

#include "torchrpc/rref.h"

#include <ATen/ATen.h>

#include <atomic>

#include "api/group.h"
#include "torchrpc/autograd.h"
#include "torchrpc/function.h"
#include "torchrpc/optim.h"

using namespace torchrpc;

namespace {

std::atomic<int> counters{0};

/// An object that stays in its process.
struct Counter {
  explicit Counter(int start) : value(start) { ++counters; }
  ~Counter() { --counters; }
  std::atomic<int> value;
};
using CounterRef = RRef<std::shared_ptr<Counter>>;

std::unique_ptr<Counter> makeCounter(int start) { return std::make_unique<Counter>(start); }
int add(const CounterRef& counter, int n) { return counter.localValue()->value += n; }
TORCHRPC_FUNCTION(makeCounter);
TORCHRPC_FUNCTION(add);

at::Tensor fetched(const RRef<at::Tensor>& rref) { return rref.toHere(); }
RRef<at::Tensor> keep(const Call& call, const at::Tensor& x) { return call.node.makeRRef(x); }
RRef<at::Tensor> passOn(const RRef<at::Tensor>& rref) { return rref; }
std::vector<RRef<at::Tensor>> twice(const RRef<at::Tensor>& rref) { return {rref, rref}; }
at::Tensor failToMake() { throw std::runtime_error("no tensor today"); }
TORCHRPC_FUNCTION(fetched);
TORCHRPC_FUNCTION(keep);
TORCHRPC_FUNCTION(passOn);
TORCHRPC_FUNCTION(twice);
TORCHRPC_FUNCTION(failToMake);

RRef<at::Tensor> smuggled;
RRef<at::Tensor> smuggle() { return smuggled; }
TORCHRPC_FUNCTION(smuggle);

at::Tensor weight(const Call& call) { return at::full({2}, 10.0 + call.node.self().id).set_requires_grad(true); }
at::Tensor timesWeight(const RRef<at::Tensor>& w, const at::Tensor& x) { return (w.localValue() * x).sum(); }
at::Tensor gradientOf(const Call& call, const RRef<at::Tensor>& w) {
  for (const auto& [leaf, gradient] : gradients(call.node, currentContextId())) {
    if (leaf.is_same(w.localValue())) return gradient;
  }
  return {};
}
TORCHRPC_FUNCTION(weight);
TORCHRPC_FUNCTION(timesWeight);
TORCHRPC_FUNCTION(gradientOf);

}  // namespace

TEST_CASE("a remote call's result stays on the callee until it is fetched") {
  Group group(2);
  const auto to = GENERATE(0, 1);
  const auto rref = group[0].remote<at::Tensor>(to, op("aten::ones"), std::vector<int>{3});
  CHECK(rref.owner().id == to);
  CHECK(rref.isOwner() == (to == 0));
  CHECK(rref.toHere().equal(at::ones({3})));
  CHECK(rref.toHereAsync().then([](const auto& it) { return it.wait().numel(); }).wait() == 3);
}

TEST_CASE("RRefs are arguments and results, of functions on any worker") {
  Group group(3);
  const auto mine = group[0].makeRRef(at::arange(3));
  CHECK(group[0].call(1, &fetched, mine).equal(at::arange(3)));
  const auto theirs = group[0].call(1, &keep, at::ones({2}));
  CHECK(theirs.owner().name == "worker1");
  CHECK(group[0].call(2, &fetched, theirs).equal(at::ones({2})));
  const auto back = group[0].call(2, &passOn, mine);
  CHECK(back.isOwner());
  CHECK(back.localValue().is_same(mine.localValue()));
  const auto pair = group[0].call(2, &twice, theirs);
  CHECK(pair.at(1).toHere().equal(at::ones({2})));
}

TEST_CASE("an RRef of one group is refused by another, which the error says") {
  Group there(2);
  Group here(2);
  const auto of_caller = GENERATE(true, false);
  const auto foreign = of_caller ? there[0].makeRRef(at::ones({2})) : there[0].call(1, &keep, at::ones({2}));
  const auto refused = [&](const std::function<void()>& use) {
    const auto error = errorOf(use);
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    CHECK_THAT(
        error.text(),
        Catch::Contains("belongs to worker0 of the group at env://") &&
            Catch::Contains("cannot be used by worker1 of the group at env://"));
  };
  refused([&] { here[1].call(0, &fetched, foreign); });
  refused([&] { here[1].call(1, &fetched, foreign); });
  refused([&] { here[1].remote<at::Tensor>(0, &fetched, foreign); });
  {
    AutogradContext context(here[1]);
    refused([&] { context.backward(foreign); });
  }
  refused([&] { DistributedOptimizer(here[1], "SGD", {foreign}, {{"lr", 0.1}}); });
  CHECK(foreign.toHere().equal(at::ones({2})));  // its own group goes on with it
  CHECK(there[0].call(1, &fetched, foreign).equal(at::ones({2})));
  CHECK(here[1].call(0, &fetched, here[1].makeRRef(at::ones({1}))).equal(at::ones({1})));
  here.shutdown();
  there.shutdown();
}

TEST_CASE("an RRef is refused by another node of its own group in the process") {
  Group group(2);
  const auto rref = group[0].makeRRef(at::ones({2}));
  const auto error = errorOf([&] { group[1].call(0, &fetched, rref); });
  CHECK_THAT(
      error.text(), Catch::Contains("cannot be used by worker1") && Catch::Contains("another node of this process"));
  group.shutdown();
}

TEST_CASE("a function's result may not be an RRef of another group") {
  Group there(1);
  Group here(2);
  const auto foreign = there[0].makeRRef(at::ones({2}));
  smuggled = foreign;
  const auto error = errorOf([&] { here[0].call(1, &smuggle); });
  smuggled = {};
  CHECK_THAT(error.text(), Catch::Contains("cannot be used by worker1 of the group"));
  here.shutdown();
  there.shutdown();
}

TEST_CASE("an object lives on its owner as long as a worker refers to it") {
  Group group(2);
  {
    const auto counter = group[0].remote<std::shared_ptr<Counter>>(1, "makeCounter", 5);
    CHECK(group[0].call(counter.owner(), &add, counter, 2) == 7);
    CHECK(group[0].call(counter.owner(), &add, counter, 1) == 8);
    CHECK(counters == 1);
    CHECK(errorOf([&] { counter.toHere(); }).code() == ErrorCode::kSerialization);
    CHECK_THAT(errorOf([&] { counter.localValue(); }).what(), Catch::Contains("lives on worker1"));
  }
  group.shutdown();
  CHECK(counters == 0);
}

TEST_CASE("the error of a remote call is thrown by the methods of its RRef") {
  Group group(2);
  const auto to = GENERATE(0, 1);
  const auto rref = group[0].remote(to, &failToMake);
  CHECK_THAT(errorOf([&] { rref.toHere(); }).what(), Catch::Contains("no tensor today"));
  CHECK(errorOf([] { RRef<int>().owner(); }).code() == ErrorCode::kInvalidArgument);
  CHECK(errorOf([&] {
          group[0].call<RRef<int>>(1, op("aten::ones"), std::vector<int>{1});
        }).code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("a backward pass leaves gradients on the workers of the leaves") {
  Group group(3);
  const auto w1 = group[0].remote(1, &weight);
  const auto w2 = group[0].remote(2, &weight);
  const auto x = at::ones({2}).set_requires_grad(true);
  {
    AutogradContext context(group[0]);
    CHECK(currentContextId() == context.id());
    const auto loss = group[0].call(1, &timesWeight, w1, x) + group[0].call(2, &timesWeight, w2, x);
    context.backward({loss});
    CHECK(context.gradient(x).equal(at::full({2}, 23.0)));
    CHECK(context.gradients().size() == 1);
    CHECK(group[0].call(1, &gradientOf, w1).equal(at::ones({2})));
    CHECK(!x.grad().defined());
    CHECK(errorOf([&] { AutogradContext inner(group[0]); }).code() == ErrorCode::kInvalidArgument);
  }
  CHECK(currentContextId() == -1);
  AutogradContext context(group[0]);
  const auto loss = group[0].remote(1, &timesWeight, w1, x);
  context.backward(loss);
  CHECK(context.gradient(x).equal(at::full({2}, 11.0)));
  CHECK_THROWS_AS(context.backward({at::ones({2})}), Error);
}

TEST_CASE("an optimizer steps parameters on their owners") {
  Group group(3);
  const std::vector<RRef<at::Tensor>> weights = {group[0].remote(1, &weight), group[0].remote(2, &weight)};
  DistributedOptimizer optimizer(group[0], "SGD", weights, {{"lr", 0.5}});
  const auto x = at::ones({2});
  const auto step = [&](bool wait) {
    AutogradContext context(group[0]);
    context.backward({group[0].call(1, &timesWeight, weights[0], x) + group[0].call(2, &timesWeight, weights[1], x)});
    if (wait) {
      optimizer.step(context);
    } else {
      optimizer.stepAsync(context.id()).wait();
    }
  };
  step(true);
  step(false);
  CHECK(weights[0].toHere().equal(at::full({2}, 10.0)));
  CHECK(weights[1].toHere().equal(at::full({2}, 11.0)));
  optimizer.setOptions({{{"lr", 1.0}}});
  step(true);
  CHECK(weights[1].toHere().equal(at::full({2}, 10.0)));
  CHECK(errorOf([&] {
          DistributedOptimizer(group[0], "SGD", weights, {{"momentun", 1.0}});
        }).code() == ErrorCode::kInvalidArgument);
}
