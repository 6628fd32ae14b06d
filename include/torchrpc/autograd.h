#pragma once

// Distributed autograd: backward passes over all workers that took part in a forward pass.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "torchrpc/node.h"
#include "torchrpc/rref.h"

namespace torchrpc {
inline namespace v1 {

/// How a backward pass determines which recorded calls take part in it.
enum class BackwardMode {
  kSmart,  ///< those that the roots depend on; unused results neither block the pass nor cost time
  kFast,   ///< all calls of the context; saves one message to each worker, but blocks on unused results
};

/// Pairs of a leaf and its gradient; the tensors themselves, not copies.
using Gradients = std::vector<std::pair<at::Tensor, at::Tensor>>;

/// A context of distributed autograd. While it exists, the calls made on its thread are recorded, and so are the calls
/// that the called functions make. Destroy it on the thread that created it; the destructor frees graph and gradients
/// on all workers. The other methods may be called from any thread.
class AutogradContext {
 public:
  /// Creates a context and enters it on this thread. Throws Error: kInvalidArgument if the thread is in a context
  /// already; kShutdown after the node's end.
  explicit AutogradContext(const NodeRef& node);
  ~AutogradContext();
  AutogradContext(const AutogradContext&) = delete;
  AutogradContext& operator=(const AutogradContext&) = delete;

  /// The id of the context on all workers, Python workers included.
  int64_t id() const;

  /// Runs a backward pass from `roots`, tensors of one element each, over all workers that they depend on, and blocks
  /// until it has ended. Gradients are accumulated in the context, each on the worker of its leaf; `.grad` does not
  /// change. Throws Error: kInvalidArgument for invalid roots; kBackward if a node of the graph or a hook threw, on any
  /// worker; kWorkerLost.
  void backward(
      const std::vector<at::Tensor>& roots, bool retain_graph = false, BackwardMode mode = BackwardMode::kSmart);
  /// The same, with the value of an RRef on any worker as the root.
  void backward(const RRef<at::Tensor>& root, bool retain_graph = false, BackwardMode mode = BackwardMode::kSmart);

  /// The gradients of leaves on this worker, in the order in which the leaves first received one.
  Gradients gradients() const;
  /// The gradient of one leaf; an undefined tensor if it has none.
  at::Tensor gradient(const at::Tensor& leaf) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Returns the gradients of leaves on this worker in the context with that id, which any worker may have created.
/// Throws Error(kInvalidArgument) if this worker knows no such context. Any thread.
Gradients gradients(const NodeRef& node, int64_t context_id);

/// The id of the context in which the calls of this thread are recorded, or -1. In a called function, it is the context
/// of the caller.
int64_t currentContextId();

}  // namespace v1
}  // namespace torchrpc
