// The execution of local graphs: the order of nodes, their gradients, what hooks see, and where gradients leave.
// Results are compared with those of torch's own engine where it can run the same graph.

#include "autograd/local_graph.h"

#include <ATen/ATen.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "autograd/context.h"
#include "autograd/gradient_loan.h"

using namespace torchrpc;
using Catch::Matchers::Contains;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::impl::gradient_edge;

namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor leaf(double value) { return at::full({2}, value).requires_grad_(); }
bool holds(const at::Tensor& tensor, double value) {
  return tensor.defined() && tensor.detach().allclose(at::full_like(tensor, value));
}

/// Runs the graph of some tensors with gradients of ones, and keeps the resulting gradients.
struct Backward {
  explicit Backward(const Tensors& roots, bool retain_graph = false) {
    LocalGraph graph(
        retain_graph,
        {.deliver = [this](const RecvFunction& recv, variable_list g) { delivered[recv.id()] = std::move(g); },
         .accumulate = [this](const at::Tensor& leaf, at::Tensor g) { gradients.emplace_back(leaf, std::move(g)); },
         .lend =
             [this](const torch::autograd::AccumulateGrad& node) {
               return std::make_shared<GradientLoan>(context, node.variable, GradientLoan::Scope::kNode);
             }});
    edge_list edges;
    variable_list ones;
    for (const auto& root : roots) {
      edges.push_back(gradient_edge(root));
      ones.push_back(at::ones_like(root));
    }
    const auto root = makeNode<SendFunction>(kNoAutogradId, std::move(edges));
    received = graph.add(root);
    graph.setGradients(*root, std::move(ones));
    graph.runInGraphTask([&] {
      while (graph.canRun()) graph.runNext();
    });
  }

  at::Tensor of(const at::Tensor& leaf) const {
    for (const auto& [tensor, gradient] : gradients) {
      if (tensor.is_same(leaf)) return gradient;
    }
    return {};
  }

  ContextPtr context = std::make_shared<AutogradContext>(makeAutogradId(0, 1));
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients;  // in the order in which they were computed
  std::map<MessageId, variable_list> delivered;
  std::vector<const RecvFunction*> received;
};

std::string errorText(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

/// A tensor that was received in message `id`, from worker 1.
at::Tensor receivedTensor(MessageId id, at::Tensor value) {
  torch::autograd::set_history(value, makeNode<RecvFunction>(id, 1, std::nullopt));
  return value;
}

struct PreHook : torch::autograd::FunctionPreHook {
  explicit PreHook(std::function<void(const variable_list&)> see) : see(std::move(see)) {}
  variable_list operator()(const variable_list& gradients) override {
    see(gradients);
    variable_list doubled;
    for (const auto& gradient : gradients) doubled.push_back(gradient * 2);
    return doubled;
  }
  std::function<void(const variable_list&)> see;
};

struct PostHook : torch::autograd::FunctionPostHook {
  explicit PostHook(std::function<void(const variable_list& outputs, const variable_list& inputs)> see)
      : see(std::move(see)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    see(outputs, inputs);
    return outputs;
  }
  std::function<void(const variable_list&, const variable_list&)> see;
};

struct PostAccumulateHook : torch::autograd::PostAccumulateGradHook {
  explicit PostAccumulateHook(std::function<void(const at::Tensor&)> see) : see(std::move(see)) {}
  void operator()(const at::Tensor& leaf) override { see(leaf); }
  std::function<void(const at::Tensor&)> see;
};

/// A node that returns fixed gradients.
struct FixedGradients : Node {
  FixedGradients(edge_list edges, variable_list gradients) : Node(std::move(edges)), gradients(std::move(gradients)) {
    add_input_metadata(at::ones({2}));
  }
  variable_list apply(variable_list&&) override { return gradients; }
  std::string name() const override { return "FixedGradients"; }
  variable_list gradients;
};

at::Tensor withFixedGradients(const at::Tensor& to, const variable_list& gradients) {
  auto result = at::ones({2});
  torch::autograd::set_history(result, makeNode<FixedGradients>(edge_list{gradient_edge(to)}, gradients));
  return result;
}

}  // namespace

TEST_CASE("gradients equal those of torch's engine") {
  const auto a = leaf(2), b = leaf(3), unused = leaf(4);
  const auto shared = a * b;
  const auto parts = at::cat({shared.sin(), shared * a, b}).unbind();
  const auto loss = (parts[0] * parts[2]).exp().sum() + (shared + parts[5]).tanh().sum();
  const Backward ours({loss}, /*retain_graph=*/true);
  loss.backward();
  CHECK(ours.gradients.size() == 2);
  CHECK(ours.of(a).allclose(a.grad()));
  CHECK(ours.of(b).allclose(b.grad()));
  CHECK_FALSE(ours.of(unused).defined());
}

TEST_CASE("of the nodes that can run, the last created one runs first") {
  std::vector<int> order;
  const auto a = leaf(1);
  const auto recordOrder = [&](at::Tensor tensor, int name) {
    tensor.grad_fn()->add_pre_hook(std::make_unique<PreHook>([&order, name](const auto&) { order.push_back(name); }));
    return tensor;
  };
  const auto first = recordOrder(a * 1, 1), second = recordOrder(a * 1, 2);
  const auto third = recordOrder(first * 1, 3);
  const auto loss = recordOrder((second + third), 4);
  const Backward ours({loss});
  CHECK(order == std::vector<int>{4, 3, 2, 1});
}

TEST_CASE("a node that is reached over several edges runs once, with the sum") {
  int runs = 0;
  const auto a = leaf(1);
  const auto shared = a * 1;
  shared.grad_fn()->add_pre_hook(std::make_unique<PreHook>([&](const variable_list& gradients) {
    ++runs;
    CHECK(holds(gradients.at(0), 11));
  }));
  const Backward ours({shared * 2 + shared * 3, shared * 5, shared});
  CHECK(runs == 1);
  CHECK(holds(ours.of(a), 22));
}

TEST_CASE("several roots, and the same one twice, add up") {
  const auto a = leaf(1), b = leaf(1);
  const auto x = (a * 2).sum(), y = (a * b * 3).sum();
  const Backward ours({x, y, x});
  CHECK(holds(ours.of(a), 7));
  CHECK(holds(ours.of(b), 3));
}

TEST_CASE("an undefined gradient stays undefined") {
  const auto a = leaf(1), b = leaf(1);
  const Backward ours({withFixedGradients(a * 2, {at::Tensor()}) + b});
  CHECK_FALSE(ours.of(a).defined());
  CHECK(holds(ours.of(b), 1));
}

TEST_CASE("the graph is freed after one pass unless it is retained") {
  const auto a = leaf(3);
  const auto loss = (a * a).sum();
  CHECK(holds(Backward({loss}, /*retain_graph=*/true).of(a), 6));
  CHECK(holds(Backward({loss}, /*retain_graph=*/false).of(a), 6));
  CHECK_THAT(errorText([&] { Backward({loss}); }), Contains("Trying to backward through the graph a second time"));
}

TEST_CASE("pre-hooks of a node see and change its gradients, tensor hooks first") {
  std::vector<std::string> order;
  const auto a = leaf(1);
  const auto product = a * 3;
  product.grad_fn()->add_pre_hook(std::make_unique<PreHook>([&](const variable_list& gradients) {
    order.push_back("node");
    CHECK(holds(gradients.at(0), 10));
  }));
  product.register_hook([&](const at::Tensor& gradient) {
    order.push_back("tensor");
    CHECK(holds(gradient, 1));
    return gradient * 10;
  });
  a.register_hook([&](const at::Tensor& gradient) { return gradient + 1; });
  const Backward ours({product.sum()});
  CHECK(order == std::vector<std::string>{"tensor", "node"});
  CHECK(holds(ours.of(a), 61));
}

TEST_CASE("post-hooks of a node see its inputs and outputs") {
  int runs = 0;
  const auto a = leaf(1);
  const auto product = a * 3;
  product.grad_fn()->add_post_hook(std::make_unique<PostHook>([&](const auto& outputs, const auto& inputs) {
    ++runs;
    CHECK(holds(outputs.at(0), 3));
    CHECK(holds(inputs.at(0), 1));
  }));
  const Backward ours({product.sum()});
  CHECK(runs == 1);
}

TEST_CASE("a post-accumulate hook sees the gradient of the pass as .grad, which is restored afterwards") {
  const auto a = leaf(1);
  a.mutable_grad() = at::full({2}, 50.);
  int runs = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(a, std::make_unique<PostAccumulateHook>([&](const at::Tensor& leaf) {
                                                   ++runs;
                                                   CHECK(holds(leaf.grad(), 3));
                                                   leaf.mutable_grad() = leaf.grad() * 2;
                                                 }));
  const Backward ours({(a * 3).sum()});
  CHECK(runs == 1);
  CHECK(ours.gradients.empty());
  REQUIRE(ours.context->gradients().size() == 1);
  CHECK(holds(ours.context->gradients()[0].second, 6));
  CHECK(holds(a.grad(), 50));
}

TEST_CASE("an exception of a hook is rethrown") {
  const auto a = leaf(1);
  const auto product = a * 3;
  product.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the hook failed"); });
  CHECK_THAT(errorText([&] { Backward({product.sum()}); }), Contains("the hook failed"));
}

TEST_CASE("gradients that do not fit are rejected with the node's name, convertible ones are converted") {
  const auto a = leaf(1);
  const auto text = [&](const variable_list& gradients) {
    return errorText([&] { Backward({withFixedGradients(a * 1, gradients)}); });
  };
  CHECK_THAT(
      text({at::ones({3})}),
      Contains("Function FixedGradients returned an invalid gradient at index 0 - got [3] but expected shape "
               "compatible with") &&
          Contains("[2]"));
  CHECK_THAT(text({at::ones({2}), at::ones({2})}), Contains("invalid number of gradients"));
  CHECK_THAT(text({}), Contains("invalid number of gradients"));
  const Backward ours({withFixedGradients(a * 1, {at::ones({3, 2}, at::kDouble)})});
  CHECK(holds(ours.of(a), 3));
  CHECK(ours.of(a).scalar_type() == at::kFloat);
}

TEST_CASE("gradients leave through receive functions, one for each tensor of the message") {
  const auto a = leaf(1);
  const auto both = makeNode<RecvFunction>(7, 1, std::nullopt);
  auto first = at::ones({2}), second = at::ones({2});
  torch::autograd::set_history(first, both);
  torch::autograd::set_history(second, both);
  const auto other = receivedTensor(8, at::ones({2}));
  const Backward ours({(first * 5 + other * a).sum()});
  REQUIRE(ours.received.size() == 2);
  REQUIRE(ours.delivered.count(7));
  CHECK(holds(ours.delivered.at(7).at(0), 5));
  CHECK_FALSE(ours.delivered.at(7).at(1).defined());
  CHECK(holds(ours.delivered.at(8).at(0), 1));
  CHECK(holds(ours.of(a), 1));
}

TEST_CASE("torch's own engine fails at a receive function, with a text that says what to do") {
  const auto loss = (receivedTensor(7, at::ones({2})) * 2).sum();
  CHECK_THAT(errorText([&] { loss.backward(); }), Contains("distributed autograd's backward(context_id, [loss])"));
}

TEST_CASE("nodes run inside a graph task of torch's engine, whose callbacks run at the end") {
  std::vector<std::string> order;
  auto& engine = torch::autograd::Engine::get_default_engine();
  LocalGraph(false, {}).runInGraphTask([&] {
    CHECK_FALSE(at::GradMode::is_enabled());
    CHECK(torch::autograd::get_current_graph_task_id() >= 0);
    engine.queue_callback([&] { order.push_back("callback"); });
    const auto a = leaf(2);
    {
      const at::AutoGradMode grad(true);
      (a * a).sum().backward();  // re-entrant
    }
    CHECK(holds(a.grad(), 4));
    order.push_back("body");
  });
  CHECK(order == std::vector<std::string>{"body", "callback"});
  CHECK(torch::autograd::get_current_graph_task_id() == -1);
}

TEST_CASE("a very deep graph does not overflow the stack") {
  constexpr int kDepth = 100'000;
  const auto a = leaf(1);
  auto deep = a * 1;
  for (int i = 1; i < kDepth; ++i) deep = deep + 1;
  {
    // Added and destroyed without a run, after the tensor that kept the graph alive.
    LocalGraph graph(false, {});
    auto unused = a * 1;
    for (int i = 1; i < kDepth; ++i) unused = unused + 1;
    graph.add(makeNode<SendFunction>(1, edge_list{gradient_edge(unused)}));
    unused = at::Tensor();
  }
  const Backward ours({std::exchange(deep, at::Tensor())});
  CHECK(holds(ours.of(a), 1));
}

TEST_CASE("dependencies are the receive functions that are reached, unless the graph is large") {
  const auto a = leaf(1);
  const auto x = receivedTensor(7, at::ones({2})), y = receivedTensor(8, at::ones({2}));
  CHECK(dependenciesOf({gradient_edge(x * a), gradient_edge(x + 1)}) == std::vector<MessageId>{7});
  const auto both = dependenciesOf({gradient_edge(x * y), Edge()});
  REQUIRE(both);
  CHECK(std::set<MessageId>(both->begin(), both->end()) == std::set<MessageId>{7, 8});
  CHECK(dependenciesOf({gradient_edge(a * 2)})->empty());
  auto large = x;
  for (int i = 0; i < 1000; ++i) large = large + 1;
  CHECK_FALSE(dependenciesOf({gradient_edge(large)}));
}
