#include "autograd/local_graph.h"

#include <ATen/ops/isnan.h>
#include <ATen/ops/ones.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

namespace torchrpc {

using torch::autograd::AccumulateGrad;
using torch::autograd::AnomalyMode;
using torch::autograd::Edge;
using torch::autograd::InputBuffer;
using torch::autograd::Node;

std::vector<const RecvFunction*> LocalGraph::add(NodePtr root) {
  std::vector<const RecvFunction*> received;
  std::vector<const Node*> to_visit{root.get()};
  roots_.emplace_back(root, 0);
  pending_[root.get()].node = std::move(root);
  while (!to_visit.empty()) {
    const Node* node = to_visit.back();
    to_visit.pop_back();
    for (const auto& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      auto& next = pending_[edge.function.get()];
      ++next.missing;
      if (next.node) continue;
      next.node = edge.function;
      to_visit.push_back(edge.function.get());
      if (const auto* recv = dynamic_cast<const RecvFunction*>(edge.function.get())) received.push_back(recv);
    }
  }
  return received;
}

void LocalGraph::setGradients(const Node& root, variable_list gradients) {
  ready_.push({pending_.at(&root).node, InputBuffer(std::move(gradients))});
}

namespace {

/// Makes the node's stream, and the current stream of each gradient's device, wait for the work that computes the
/// gradients. The buffer has events for work that was queued on another stream.
void waitForInputs(const InputBuffer& inputs, const std::optional<c10::Stream>& stream) {
  for (size_t i = 0; i < inputs.ready_events.size(); ++i) {
    const auto& event = inputs.ready_events[i];
    if (!event) continue;
    if (stream && stream->device_type() == event->device_type()) event->block(*stream);
    const auto& gradient = inputs.buffer[i];
    if (!gradient.defined() || !isAccelerator(gradient.device())) continue;
    for (const auto& current : currentStreams({gradient.device()})) event->block(current);
  }
}

}  // namespace

void LocalGraph::runNext() {
  // top() is const, but the element is removed in the next line.
  auto [node, inputs] = std::move(const_cast<Ready&>(ready_.top()));  // NOLINT
  ready_.pop();
  const auto stream = node->stream();
  const c10::OptionalStreamGuard guard(stream);
  waitForInputs(inputs, stream);
  if (stream && std::ranges::find(streams_, *stream) == streams_.end()) streams_.push_back(*stream);
  variable_list outputs;
  try {
    outputs = runNode(*node, std::move(inputs.buffer));
  } catch (...) {
    if (AnomalyMode::is_enabled()) node->metadata()->print_stack(node->name());
    throw;
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (node->next_edge(i).is_valid()) propagate(node->next_edge(i), std::move(outputs[i]), stream);
  }
}

StreamEventsPtr LocalGraph::recordStreams() const {
  return streams_.empty() ? nullptr : std::make_shared<const StreamEvents>(streams_);
}

void LocalGraph::propagate(const Edge& edge, at::Tensor gradient, std::optional<c10::Stream> stream) {
  auto& next = pending_.at(edge.function.get());
  if (!next.inputs) next.inputs.emplace(next.node->num_inputs());
  next.inputs->add(edge.input_nr, std::move(gradient), stream, next.node->stream(), next.node.get());
  if (--next.missing > 0) return;
  ready_.push({next.node, *std::move(next.inputs)});
  next.inputs.reset();
}

namespace {

void checkForNan(const Node& node, const variable_list& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    TORCH_CHECK(
        !outputs[i].defined() || !at::isnan(outputs[i]).any().item<bool>(), "Function '", node.name(),
        "' returned nan values in its ", i, "th output.");
  }
}

variable_list runPreHooks(Node& node, variable_list gradients) {
  for (const auto& hook : node.tensor_pre_hooks()) gradients = (*hook)(gradients);
  for (const auto& [output, hook] : node.retains_grad_hooks()) gradients = (*hook)(gradients);
  for (const auto& hook : node.pre_hooks()) gradients = (*hook)(gradients);
  return gradients;
}

}  // namespace

variable_list LocalGraph::runNode(Node& node, variable_list gradients) {
  gradients = runPreHooks(node, std::move(gradients));
  std::shared_ptr<void> loan;
  if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(&node)) {
    if (leaf->post_hooks().empty() && !leaf->tensor_post_acc_grad_hooks()) {
      if (gradients[0].defined()) sinks_.accumulate(leaf->variable, std::move(gradients[0]));
      return {};
    }
    loan = sinks_.lend(*leaf);
  }
  if (!retain_graph_) node.will_release_variables();
  variable_list inputs;  // a copy only for hooks: without one, the node owns the gradients and may reuse them
  if (!node.post_hooks().empty()) inputs = gradients;
  variable_list outputs;
  if (const auto* recv = dynamic_cast<const RecvFunction*>(&node)) {
    const RecvFunction::DeliveryScope delivery(*recv, sinks_.deliver);
    outputs = node(std::move(gradients));
  } else {
    outputs = node(std::move(gradients));
  }
  torch::autograd::validate_outputs(node.next_edges(), outputs, [&](const std::string& message) {
    return "Function " + node.name() + " returned an " + message;
  });
  for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, inputs);
  if (!retain_graph_) node.release_variables();
  if (AnomalyMode::is_enabled() && AnomalyMode::should_check_nan()) checkForNan(node, outputs);
  return outputs;
}

namespace {

/// The only node of the graph task that torch's engine runs. The engine visits the nodes below it when it prepares the
/// task, but runs none of them.
class Body final : public Node {
 public:
  Body(edge_list graph, std::function<void()> run) : Node(std::move(graph)), run_(std::move(run)) {
    add_input_metadata(signal());
  }

  std::string name() const override { return "torchrpc::BackwardPass"; }

  static const at::Tensor& signal() {
    static const at::Tensor tensor = at::ones({1});
    return tensor;
  }

 protected:
  variable_list apply(variable_list&& /*gradients*/) override {
    set_next_edges({});
    run_();
    return {};
  }

 private:
  const std::function<void()> run_;
};

}  // namespace

void LocalGraph::runInGraphTask(std::function<void()> body) const {
  const auto node = makeNode<Body>(roots_, std::move(body));
  torch::autograd::Engine::get_default_engine().execute(
      {Edge(node, 0)}, {Body::signal()}, retain_graph_, /*create_graph=*/false, /*accumulate_grad=*/true);
}

}  // namespace torchrpc
