#pragma once

// An optimizer of parameters on several workers.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "torchrpc/autograd.h"
#include "torchrpc/future.h"
#include "torchrpc/node.h"
#include "torchrpc/rref.h"

namespace torchrpc {
inline namespace v1 {

/// Options by their names in torch.optim: `{{"lr", 0.1}, {"momentum", 0.9}}`. Numbers, bools, std::tuple of two numbers
/// (betas) or c10::IValue() for None. Those that are not given have torch.optim's defaults.
using OptimizerOptions = std::map<std::string, c10::IValue>;

/// Parameters that are stepped with the same options.
struct ParamGroup {
  std::vector<RRef<at::Tensor>> params;  ///< to leaf tensors, on any workers
  OptimizerOptions options;              ///< of theirs
};

/// Steps parameters where they are: one optimizer on each worker that owns some, C++ or Python, all of them asked at
/// once. Every method may be called from any thread. Dropping it drops the optimizers.
class DistributedOptimizer {
 public:
  /// What holds for all groups.
  struct Settings {
    bool lock_free = false;                       ///< Hogwild: steps of several trainers do not wait for each other
    Duration timeout = std::chrono::seconds(60);  ///< of each request to an owner; 0: none
  };

  /// `kind` is one of SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, Rprop, with the arithmetic of that class of
  /// torch.optim. Blocks until all owners have their part. Throws Error: kInvalidArgument for options and parameters
  /// that cannot be; what went wrong on an owner.
  DistributedOptimizer(
      const NodeRef& node, std::string kind, const std::vector<ParamGroup>& groups, const Settings& settings);
  /// The same of one group with default settings.
  DistributedOptimizer(
      const NodeRef& node, std::string kind, std::vector<RRef<at::Tensor>> params, OptimizerOptions options);
  ~DistributedOptimizer();
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  /// Steps all parameters by their gradients in a context; those without one stay. Blocks until all owners have done
  /// so. Throws Error: kInvalidArgument if this worker knows no such context; the first error of an owner, naming it:
  /// the others have stepped nevertheless.
  void step(const AutogradContext& context) { step(context.id()); }
  /// The same by the id of the context.
  void step(int64_t context_id);
  /// The same without blocking. The context must live until it is over.
  Future<void> stepAsync(int64_t context_id);

  /// Changes options of each group, those that are named; they travel with the next step. Throws
  /// Error(kInvalidArgument).
  void setOptions(const std::vector<OptimizerOptions>& groups);

  /// The state of each parameter (a copy) by the names of torch.optim, in the order given; empty for one that has never
  /// been stepped. Blocks, and throws as step() does.
  std::vector<std::map<std::string, at::Tensor>> state();
  /// The reverse: copies the tensors. Likewise; Error(kInvalidArgument) for states that do not fit.
  void load(const std::vector<std::map<std::string, at::Tensor>>& states);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace v1
}  // namespace torchrpc
