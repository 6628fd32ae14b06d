// Backward passes over several workers: their gradients, the messages they need, and how they fail.

#include <future>
#include <latch>

#include "autograd/autograd_group.h"

using namespace torchrpc;
using namespace torchrpc::test;
using Catch::Matchers::Contains;
using namespace std::chrono_literals;

namespace {

constexpr auto kMark = Kind::kAutogradMark;
constexpr auto kGradients = Kind::kAutogradGradients;

/// The functions that the tests call. The weight of worker i has the value i + 2.
struct Model {
  std::vector<at::Tensor> weights{leaf(2), leaf(3), leaf(4), leaf(5)};
  at::Tensor kept;
  AutogradWorker::Functions functions{
      {"mul", [](AutogradWorker&, Tensors args) -> Tensors { return {args.at(0) * args.at(1)}; }},
      {"weigh", [this](AutogradWorker& here, Tensors args) -> Tensors { return {args.at(0) * weight(here)}; }},
      // Calls the next worker.
      {"nested",
       [this](AutogradWorker& here, Tensors args) -> Tensors {
         return {here.callOne((here.id() + 1) % 3, "weigh", {args.at(0) * weight(here)}) * 2};
       }},
      // Calls the previous worker.
      {"bounce",
       [this](AutogradWorker& here, Tensors args) -> Tensors {
         return {here.callOne(here.id() - 1, "weigh", {args.at(0) * weight(here)})};
       }},
      // Each of its two results depends on one of its two arguments.
      {"pair",
       [this](AutogradWorker& here, Tensors args) -> Tensors {
         return {args.at(0) * weight(here), args.at(1) * weight(here)};
       }},
      // Keeps a result on the callee, for a later call.
      {"keep",
       [this](AutogradWorker& here, Tensors args) -> Tensors {
         kept = args.at(0) * weight(here);
         return {at::ones({2})};
       }},
      {"add kept",
       [this](AutogradWorker& here, Tensors args) -> Tensors { return {args.at(0) * weight(here) + kept}; }},
      // Its part of a backward pass waits for `go`.
      {"hold backward",
       [this](AutogradWorker& here, Tensors args) -> Tensors {
         const auto result = args.at(0) * weight(here);
         result.register_hook([this](const at::Tensor& gradient) {
           go.wait();
           return gradient;
         });
         return {result};
       }},
      {"fail backward",
       [this](AutogradWorker& here, Tensors args) -> Tensors {
         const auto result = args.at(0) * weight(here);
         result.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("broken on purpose"); });
         return {result};
       }},
  };
  std::latch go{1};
  at::Tensor& weight(AutogradWorker& here) { return weights.at(static_cast<size_t>(here.id())); }
};

struct Fixture : Model {
  explicit Fixture(int size) : group(size, functions) {}
  /// Whether no worker has a pass soon. A worker sends its last reply shortly before it removes its pass.
  bool noPassLeft() {
    return eventually([&] { return group.passes() == 0; });
  }
  int served(Kind kind) {
    int sum = 0;
    for (int id = 0; id < group.size(); ++id) sum += group[id].served(kind);
    return sum;
  }
  at::Tensor gradient(int worker, ContextId context) {
    return gradientOf(group[worker], context, weights.at(static_cast<size_t>(worker)));
  }
  AutogradGroup group;
};

BackwardMode anyMode() { return GENERATE(BackwardMode::kFast, BackwardMode::kSmart); }

}  // namespace

TEST_CASE("a remote operator's gradient reaches both of its arguments") {
  Fixture t(3);
  const auto mode = anyMode();
  const auto to = GENERATE(0, 1);
  const OwnContext context(t.group[0]);
  const auto a = leaf(2), b = leaf(7);
  const auto product = t.group[0].callOne(to, "mul", {a, b}, Kind::kBuiltinCall);
  t.group[0].autograd().backward(context.id(), {product.sum()}, false, mode);
  CHECK(holds(gradientOf(t.group[0], context.id(), a), 7));
  CHECK(holds(gradientOf(t.group[0], context.id(), b), 2));
  CHECK_FALSE(a.grad().defined());
  CHECK(t.noPassLeft());
}

TEST_CASE("a pass follows nested calls, and each worker keeps the gradients of its own leaves") {
  Fixture t(3);
  const auto mode = anyMode();
  const OwnContext context(t.group[0]);
  const auto x = leaf(1);
  const auto y = t.group[0].callOne(1, "nested", {x * t.weights[0]});  // 2 * w2 * w1 * w0 * x
  t.group[0].autograd().backward(context.id(), {y.sum()}, false, mode);
  CHECK(holds(gradientOf(t.group[0], context.id(), x), 48));
  CHECK(holds(t.gradient(0, context.id()), 24));
  CHECK(holds(t.gradient(1, context.id()), 16));
  CHECK(holds(t.gradient(2, context.id()), 12));
  CHECK(t.group[0].autograd().gradients(context.id()).size() == 2);
  CHECK(t.group[1].autograd().gradients(context.id()).size() == 1);
  CHECK(t.noPassLeft());
}

TEST_CASE("a pass can return to the worker that it has come from") {
  Fixture t(2);
  const auto mode = anyMode();
  const OwnContext context(t.group[0]);
  const auto x = leaf(1);
  const auto y = t.group[0].callOne(1, "bounce", {x});  // w0 * w1 * x
  t.group[0].autograd().backward(context.id(), {(y * t.weights[0]).sum()}, false, mode);
  CHECK(holds(gradientOf(t.group[0], context.id(), x), 12));
  CHECK(holds(t.gradient(0, context.id()), 12));
  CHECK(holds(t.gradient(1, context.id()), 4));
  CHECK(t.noPassLeft());
}

TEST_CASE("SMART ignores results that the loss does not use, and sends no message to their workers") {
  Fixture t(3);
  const OwnContext context(t.group[0]);
  const auto x = leaf(1);
  const auto used = t.group[0].callOne(1, "weigh", {x});
  const auto unused = t.group[0].callOne(2, "weigh", {x});
  t.group[0].autograd().backward(context.id(), {used.sum()}, false, BackwardMode::kSmart);
  CHECK(holds(gradientOf(t.group[0], context.id(), x), 3));
  CHECK(t.group[2].autograd().gradients(context.id()).empty());
  CHECK(t.group[1].served(kGradients) == 1);
  for (const auto kind : {kMark, kGradients, Kind::kAutogradAbort}) CHECK(t.group[2].served(kind) == 0);
  CHECK(t.noPassLeft());
}

TEST_CASE("no marking is sent in SMART mode where replies declare their dependencies, and never in FAST mode") {
  Fixture t(3);
  const auto mode = anyMode();
  const OwnContext context(t.group[0]);
  const auto x = leaf(1);
  const auto y = t.group[0].callOne(1, "weigh", {t.group[0].callOne(2, "weigh", {x})});
  t.group[0].autograd().backward(context.id(), {y.sum()}, false, mode);
  CHECK(holds(gradientOf(t.group[0], context.id(), x), 12));
  CHECK(t.served(kMark) == 0);
  CHECK(t.served(kGradients) == 2);  // gradients for worker 0 come with the replies
}

TEST_CASE("of the gradients for the worker that started the local part, the last come with the reply") {
  Fixture t(2);
  const auto mode = anyMode();
  const OwnContext context(t.group[0]);
  const auto x = leaf(1), y = leaf(2);
  t.group[0].callOne(1, "keep", {x});
  const auto sum = t.group[0].callOne(1, "add kept", {y});
  t.group[0].autograd().backward(context.id(), {sum.sum()}, false, mode);
  CHECK(holds(gradientOf(t.group[0], context.id(), x), 3));
  CHECK(holds(gradientOf(t.group[0], context.id(), y), 3));
  CHECK(t.group[1].served(kGradients) == 1);
  CHECK(t.group[0].served(kGradients) == 1);
  CHECK(t.noPassLeft());
}

TEST_CASE("tensors of a message that are not used get no gradient") {
  Fixture t(2);
  const auto mode = anyMode();
  const OwnContext context(t.group[0]);
  const auto a = leaf(2), b = leaf(7);
  const auto results = t.group[0].call(1, "pair", {a, b});
  t.group[0].autograd().backward(context.id(), {results.at(0).sum()}, false, mode);
  CHECK(holds(gradientOf(t.group[0], context.id(), a), 3));
  CHECK_FALSE(gradientOf(t.group[0], context.id(), b).defined());
  CHECK(holds(t.gradient(1, context.id()), 2));
}

TEST_CASE("FAST fails after its timeout if a result is not used, and the error says what to do") {
  Fixture t(2);
  // The gradient of the result that is used must arrive within it.
  t.group.setProgressTimeout(500ms);
  const OwnContext context(t.group[0]);
  const auto x = leaf(1);
  const auto used = t.group[0].callOne(1, "weigh", {x}), unused = t.group[0].callOne(1, "weigh", {x});
  const auto error =
      errorOf([&] { t.group[0].autograd().backward(context.id(), {used.sum()}, false, BackwardMode::kFast); });
  CHECK(error.code() == ErrorCode::kTimeout);
  CHECK_THAT(
      error.text(),
      Contains("RPC ran for more than set timeout") && Contains("misses the gradients of 1 of the 2") &&
          Contains("mode=\"smart\""));
  CHECK(t.noPassLeft());
  t.group[0].autograd().backward(context.id(), {unused.sum()}, false, BackwardMode::kSmart);
  CHECK(holds(gradientOf(t.group[0], context.id(), x), 3));
}

TEST_CASE("FAST fails after its timeout if another worker does not end its part, and SMART waits for it") {
  Fixture t(2);
  const OwnContext context(t.group[0]);
  const auto y = t.group[0].callOne(1, "hold backward", {at::ones({2})}).sum();
  t.group.setProgressTimeout(20ms);
  const auto error = errorOf([&] { t.group[0].autograd().backward(context.id(), {y}, true, BackwardMode::kFast); });
  CHECK(error.code() == ErrorCode::kTimeout);
  CHECK_THAT(
      error.text(), Contains("RPC ran for more than set timeout") && Contains("waits for 1 answers of other workers"));
  std::thread release([&] { t.go.count_down(); });
  t.group[0].autograd().backward(context.id(), {y}, false, BackwardMode::kSmart);
  release.join();
  CHECK(t.noPassLeft());
}

TEST_CASE("passes in different contexts run at the same time without influence on each other") {
  Fixture t(3);
  const auto mode = anyMode();
  std::latch both(2);
  const auto train = [&](int root, double value) {
    const OwnContext context(t.group[root]);
    const auto x = leaf(value);
    const auto y = t.group[root].callOne(2, "weigh", {x});
    both.arrive_and_wait();
    t.group[root].autograd().backward(context.id(), {y.sum()}, false, mode);
    return std::pair(gradientOf(t.group[root], context.id(), x), gradientOf(t.group[2], context.id(), t.weights[2]));
  };
  auto other = std::async(std::launch::async, train, 1, 20.);
  const auto [x, w] = train(0, 10.);
  const auto [other_x, other_w] = other.get();
  CHECK(holds(x, 4));
  CHECK(holds(w, 10));
  CHECK(holds(other_x, 4));
  CHECK(holds(other_w, 20));
  CHECK(t.noPassLeft());
}

TEST_CASE("a second pass adds to the gradients if the graph was retained, otherwise it fails on all workers") {
  Fixture t(2);
  const auto mode = anyMode();
  const OwnContext context(t.group[0]);
  const auto x = leaf(1);
  const auto loss = t.group[0].callOne(1, "weigh", {x * x}).sum();
  const auto backward = [&](bool retain) { t.group[0].autograd().backward(context.id(), {loss}, retain, mode); };
  backward(true);
  backward(true);
  CHECK(holds(gradientOf(t.group[0], context.id(), x), 12));
  CHECK(holds(t.gradient(1, context.id()), 2));
  backward(false);
  const auto error = errorOf([&] { backward(false); });
  CHECK(error.code() == ErrorCode::kBackward);
  CHECK_THAT(error.text(), Contains("Error on Node 1") && Contains("a second time"));
  CHECK(holds(gradientOf(t.group[0], context.id(), x), 18));
  CHECK(holds(t.gradient(1, context.id()), 3));
  CHECK(t.noPassLeft());
}

TEST_CASE("an exception of a remote node reaches the root, and the pass ends on all workers without gradients") {
  Fixture t(3);
  const auto mode = anyMode();
  const OwnContext context(t.group[0]);
  const auto x = leaf(1);
  const auto fine = t.group[0].callOne(2, "weigh", {x});
  const auto broken = t.group[0].callOne(1, "fail backward", {fine});
  const auto error =
      errorOf([&] { t.group[0].autograd().backward(context.id(), {(broken + fine).sum()}, false, mode); });
  CHECK(error.code() == ErrorCode::kBackward);
  CHECK(error.text() == "Error on Node 1: broken on purpose");
  CHECK(error.worker() == "worker1");
  CHECK(t.noPassLeft());
  for (int id = 0; id < 3; ++id) CHECK(t.group[id].autograd().gradients(context.id()).empty());
}

TEST_CASE("an exception of a node on the worker with the roots ends the pass on the other workers, too") {
  Fixture t(2);
  const auto mode = anyMode();
  const OwnContext context(t.group[0]);
  const auto x = leaf(1);
  const auto product = x * 2;
  product.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("broken on the root worker"); });
  const auto y = t.group[0].callOne(1, "weigh", {product});
  const auto error = errorOf([&] { t.group[0].autograd().backward(context.id(), {y.sum()}, false, mode); });
  CHECK(error.text() == "Error on Node 0: broken on the root worker");
  CHECK(t.noPassLeft());
  CHECK(t.group[0].autograd().gradients(context.id()).empty());
}

TEST_CASE("invalid roots are rejected, and no pass starts") {
  Fixture t(2);
  const OwnContext context(t.group[0]);
  const auto x = leaf(1);
  const auto text = [&](const Tensors& roots, ContextId id) {
    return errorOf([&] { t.group[0].autograd().backward(id, roots, false, BackwardMode::kFast); }).text();
  };
  CHECK_THAT(text({}, context.id()), Contains("No tensors provided"));
  CHECK_THAT(text({x * 2}, context.id()), Contains("not a scalar"));
  CHECK_THAT(text({at::ones({1})}, context.id()), Contains("requires_grad not set"));
  CHECK_THAT(text({at::ones({1}).requires_grad_()}, context.id()), Contains("valid gradient function"));
  CHECK_THAT(text({x.sum()}, 12345), Contains("Could not find autograd context with id: 12345"));
  CHECK(t.group.passes() == 0);
}

TEST_CASE("a pass from an RRef starts on its owner") {
  Fixture t(2);
  const auto mode = anyMode();
  const auto owner = GENERATE(0, 1);
  const OwnContext context(t.group[0]);
  const auto x = leaf(1);
  // The call makes the context known on worker 1; the value stands for its result.
  const auto y = t.group[0].callOne(1, "weigh", {x}).sum();
  at::Tensor value = y;
  if (owner == 1) value = (leaf(1) * 2).sum();
  const auto rref = t.group.give(owner, value, 0);
  if (owner == 0) {
    t.group[0].autograd().backward(context.id(), rref, false, mode);
    CHECK(holds(t.gradient(1, context.id()), 1));
  } else {
    t.group[0].autograd().backward(context.id(), rref, false, BackwardMode::kSmart);
    CHECK(t.group[1].autograd().gradients(context.id()).size() == 1);
  }
  const auto text = t.group.give(owner, at::ones({2}), 0);
  CHECK_THAT(
      errorOf([&] { t.group[0].autograd().backward(context.id(), text, false, mode); }).text(),
      Contains("requires_grad not set"));
  CHECK(t.noPassLeft());
}

TEST_CASE("a pass from an RRef starts when the value is set") {
  Fixture t(2);
  const OwnContext context(t.group[0]);
  t.group[0].callOne(1, "weigh", {leaf(1)});
  const auto owned = t.group[1].rrefs().createOwner();
  const auto rref = t.group.share(1, owned, 0);
  auto pass = std::async(
      std::launch::async, [&] { t.group[0].autograd().backward(context.id(), rref, false, BackwardMode::kSmart); });
  while (t.group[1].served(Kind::kRRefBackward) == 0) std::this_thread::yield();
  CHECK(t.group[1].autograd().gradients(context.id()).empty());
  owned->setValue((leaf(1) * 2).sum());
  pass.get();
  CHECK(t.group[1].autograd().gradients(context.id()).size() == 1);
}

TEST_CASE("a worker that is lost during a pass fails it, and the error names the worker") {
  Model model;
  std::latch reached(1), released(1);
  model.functions["hang backward"] = [&](AutogradWorker& here, Tensors args) -> Tensors {
    const auto result = args.at(0) * model.weight(here);
    result.register_hook([&](const at::Tensor& gradient) {
      reached.count_down();
      released.wait();
      return gradient;
    });
    return {result};
  };
  AutogradGroup group(3, model.functions);
  const auto mode = anyMode();
  const OwnContext context(group[0]);
  const auto x = leaf(1);
  const auto y = group[0].callOne(2, "weigh", {group[0].callOne(1, "hang backward", {x})});
  auto failure = std::async(std::launch::async, [&] {
    return errorOf([&] { group[0].autograd().backward(context.id(), {y.sum()}, false, mode); });
  });
  reached.wait();
  std::thread closing([&] { group.agent(1).close(); });
  const auto error = failure.get();
  CHECK(error.code() == ErrorCode::kWorkerLost);
  CHECK_THAT(error.text(), Contains("worker1"));
  released.count_down();
  closing.join();
  CHECK(eventually([&] { return group[0].autograd().debugInfo().backward_passes == 0; }));
  CHECK(eventually([&] { return group[2].autograd().debugInfo().backward_passes == 0; }));
}
