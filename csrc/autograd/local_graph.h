#pragma once

// The part of this process' autograd graph that one backward pass goes through, and the running of its nodes: what
// torch's engine does for a graph of its own, whose graph tasks cannot be fed from outside LibTorch. It runs inside one
// of them (runInGraphTask), so that what hooks ask torch about the running pass has an answer.
//
// Nodes run on the calling thread, one at a time, latest made first, as torch's engine runs them on a CPU: hooks see
// that order. Operators use torch's own threads. One thread at a time.

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/input_buffer.h>

#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <unordered_map>
#include <vector>

#include "autograd/functions.h"

namespace torchrpc {

class LocalGraph {
 public:
  /// Where gradients leave the graph.
  struct Exits {
    RecvFunction::Deliver deliver;  ///< to another worker
    std::function<void(const at::Tensor& leaf, at::Tensor gradient)> accumulate;
    /// A leaf with hooks that look at its .grad: gives what keeps .grad as they are to see it.
    std::function<std::shared_ptr<void>(const torch::autograd::AccumulateGrad& node)> lend;
  };

  LocalGraph(bool retain_graph, Exits exits) : retain_graph_(retain_graph), exits_(std::move(exits)) {}

  /// Takes in all that can be reached from a node's edges; `root` itself is to get its gradients from outside.
  /// Gives the receive functions that are new. Before the first node runs.
  std::vector<const RecvFunction*> add(NodePtr root);

  /// The gradients of a root; it and what depends on it alone can run now.
  void give(const torch::autograd::Node& root, variable_list gradients);
  bool canRun() const { return !ready_.empty(); }
  /// Runs a node that has all its gradients. Throws what it, or a hook, throws.
  void runNext();

  /// Runs `body` inside a graph task of torch's engine, on this thread, with gradients' recording off: there is a
  /// current graph task, which knows this graph's nodes, for hooks to ask about, backward passes begun in it are
  /// re-entrant ones, and callbacks queued with the engine run once `body` has returned. Throws what they throw.
  void runInGraphTask(std::function<void()> body) const;

 private:
  struct Pending {
    NodePtr node;
    size_t missing = 0;  ///< edges over which nothing has come yet
    std::optional<torch::autograd::InputBuffer> inputs;
  };
  struct Ready {
    NodePtr node;
    variable_list gradients;
  };
  struct MadeEarlier {
    bool operator()(const Ready& a, const Ready& b) const { return a.node->sequence_nr() < b.node->sequence_nr(); }
  };

  /// Gives what `node` has made of its gradients.
  variable_list call(torch::autograd::Node& node, variable_list gradients);
  void pass(const torch::autograd::Edge& edge, at::Tensor gradient, std::optional<c10::Stream> stream);

  const bool retain_graph_;
  const Exits exits_;
  edge_list roots_;
  std::unordered_map<const torch::autograd::Node*, Pending> pending_;
  std::priority_queue<Ready, std::vector<Ready>, MadeEarlier> ready_;
};

}  // namespace torchrpc
