#pragma once

// Distributed autograd: backward passes over all workers that took part in the forward pass.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "torchrpc/node.h"
#include "torchrpc/rref.h"

namespace torchrpc {
inline namespace v1 {

/// How a backward pass finds out what takes part in it.
enum class BackwardMode {
  kSmart,  ///< what the roots depend on: results that nobody used neither hang nor cost
  kFast,   ///< all that was sent in the context: saves a message to each worker
};

/// (leaf, gradient): the tensors themselves, not copies.
using Gradients = std::vector<std::pair<at::Tensor, at::Tensor>>;

/// A context of distributed autograd: as long as it lives, calls made on its thread are recorded, and so are those that
/// the called functions make. Must be destroyed on the thread that made it; the destructor lets graph and gradients go
/// on all workers. The other methods may be called from any thread.
class AutogradContext {
 public:
  /// Throws Error: kInvalidArgument if the thread is in a context already; kShutdown.
  explicit AutogradContext(const NodeRef& node);
  ~AutogradContext();
  AutogradContext(const AutogradContext&) = delete;
  AutogradContext& operator=(const AutogradContext&) = delete;

  /// Names the context on all workers, Python ones included.
  int64_t id() const;

  /// Runs a backward pass from `roots`, tensors of one element each, over all workers that they depend on, and blocks
  /// until it is over. Gradients are added up in the context, each on the worker of its leaf; `.grad` is not touched.
  /// Throws Error: kInvalidArgument for roots that cannot be; kBackward for what a node of the graph or a hook threw,
  /// here or elsewhere; kWorkerLost.
  void backward(
      const std::vector<at::Tensor>& roots, bool retain_graph = false, BackwardMode mode = BackwardMode::kSmart);
  /// The same from the value of an RRef, on whichever worker it is.
  void backward(const RRef<at::Tensor>& root, bool retain_graph = false, BackwardMode mode = BackwardMode::kSmart);

  /// The gradients of leaves on this worker, in the order of their first ones.
  Gradients gradients() const;
  /// That of one leaf; undefined if it has none.
  at::Tensor gradient(const at::Tensor& leaf) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The gradients of leaves on this worker in a context that any worker has made: for functions that are called with its
/// id. Throws Error(kInvalidArgument) if this worker knows no such context. Any thread.
Gradients gradients(const NodeRef& node, int64_t context_id);

/// The context that calls on this thread are recorded in (in a function: its caller's), or -1.
int64_t currentContextId();

}  // namespace v1
}  // namespace torchrpc
