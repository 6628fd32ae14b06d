#pragma once

// The part of this process' autograd graph that one backward pass covers, and the execution of its nodes. It does what
// torch's engine does for a local pass; the engine itself cannot be used, because LibTorch offers no way to give a
// running graph task more gradients. The nodes run inside a graph task of the engine (runInGraphTask), so that hooks
// can query the current graph task.
//
// Nodes run on the calling thread, one at a time, the last created one first. Hooks see the same order as with torch's
// engine on a CPU. Operators use torch's own threads. Not thread-safe: one thread at a time.

#include <torch/csrc/autograd/input_buffer.h>

#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <unordered_map>
#include <vector>

#include "autograd/functions.h"
#include "device/streams.h"

namespace torch::autograd {
struct AccumulateGrad;  // its header includes every operator of torch
}

namespace torchrpc {

class LocalGraph {
 public:
  /// The functions that receive the gradients which leave the graph.
  struct Sinks {
    RecvFunction::Deliver deliver;  ///< for another worker
    std::function<void(const at::Tensor& leaf, at::Tensor gradient)> accumulate;
    /// Called before the hooks of a leaf that read .grad: sets .grad for them while the result lives.
    std::function<std::shared_ptr<void>(const torch::autograd::AccumulateGrad& node)> lend;
  };

  LocalGraph(bool retain_graph, Sinks exits) : retain_graph_(retain_graph), sinks_(std::move(exits)) {}

  /// Adds `root` and all nodes that can be reached from it; setGradients() sets the gradients of `root`. Returns the
  /// receive functions that are new. Must be called before the first node runs.
  std::vector<const RecvFunction*> add(NodePtr root);

  /// Sets the gradients of a root, so that it can run.
  void setGradients(const torch::autograd::Node& root, variable_list gradients);
  bool canRun() const { return !ready_.empty(); }
  /// Runs one node that has all its gradients. Throws the exceptions of the node and its hooks.
  void runNext();

  /// Records the device work that the nodes have queued, each on the stream of its forward pass; null if there is none.
  StreamEventsPtr recordStreams() const;

  /// Runs `body` inside a graph task of torch's engine, on this thread, with grad mode off. Hooks can query that graph
  /// task, which knows this graph's nodes; backward passes started in it are re-entrant ones; callbacks queued with the
  /// engine run after `body` has returned. Throws their exceptions.
  void runInGraphTask(std::function<void()> body) const;

 private:
  struct Pending {
    NodePtr node;
    size_t missing = 0;  ///< edges that have not passed a gradient yet
    std::optional<torch::autograd::InputBuffer> inputs;
  };
  struct Ready {
    NodePtr node;
    torch::autograd::InputBuffer inputs;
  };
  struct CreatedEarlier {
    bool operator()(const Ready& a, const Ready& b) const { return a.node->sequence_nr() < b.node->sequence_nr(); }
  };

  /// Runs a node with its hooks; returns the gradients of its inputs.
  variable_list runNode(torch::autograd::Node& node, variable_list gradients);
  void propagate(const torch::autograd::Edge& edge, at::Tensor gradient, std::optional<c10::Stream> stream);

  const bool retain_graph_;
  const Sinks sinks_;
  edge_list roots_;
  Streams streams_;  ///< of nodes that have run
  std::unordered_map<const torch::autograd::Node*, Pending> pending_;
  std::priority_queue<Ready, std::vector<Ready>, CreatedEarlier> ready_;
};

}  // namespace torchrpc
