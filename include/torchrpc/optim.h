#pragma once

// An optimizer for parameters on several workers.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "torchrpc/autograd.h"
#include "torchrpc/defaults.h"
#include "torchrpc/detail/ivalue.h"
#include "torchrpc/future.h"
#include "torchrpc/node.h"
#include "torchrpc/rref.h"

namespace torchrpc {
inline namespace v1 {

/// Options by their names in torch.optim: `{{"lr", 0.1}, {"momentum", 0.9}}`. Values are numbers, bools, a std::tuple
/// of two numbers (betas) or c10::IValue() for None. Missing options have the defaults of torch.optim.
using OptimizerOptions = std::map<std::string, c10::IValue>;

/// Parameters that share options.
struct ParamGroup {
  std::vector<RRef<at::Tensor>> params{};  ///< references to leaf tensors, on any workers
  OptimizerOptions options{};              ///< for these parameters
};

/// Steps parameters on the workers that own them, C++ or Python: one local optimizer on each, stepped in parallel.
/// Every method may be called from any thread. The destructor deletes the local optimizers.
class DistributedOptimizer {
 public:
  /// Settings for all groups.
  struct Settings {
    bool lock_free = false;             ///< Hogwild: steps of several trainers are not serialized
    Timeout timeout = kDefaultTimeout;  ///< of each request to an owner; kNoLimit: none
  };

  /// `kind` is one of SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, Rprop, with the arithmetic of that class of
  /// torch.optim. Blocks until all owners have created their local optimizers. Throws Error: kInvalidArgument for
  /// invalid options or parameters; the error of an owner.
  DistributedOptimizer(
      const NodeRef& node, std::string kind, const std::vector<ParamGroup>& groups, const Settings& settings);
  /// The same for one group, with default settings.
  DistributedOptimizer(
      const NodeRef& node, std::string kind, std::vector<RRef<at::Tensor>> params, OptimizerOptions options);
  ~DistributedOptimizer();
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  /// Steps all parameters by their gradients in a context. Parameters without a gradient do not change. Blocks until
  /// all owners have finished. Throws Error: kInvalidArgument if this worker knows no such context; the first error of
  /// an owner, with its name, after all other owners have stepped.
  void step(const AutogradContext& context) { step(context.id()); }
  /// The same by the id of the context.
  void step(int64_t context_id);
  /// The same without blocking. The context must exist until the future is ready.
  Future<void> stepAsync(int64_t context_id);

  /// Changes the given options of each group, one entry for each group in order. They are sent with the next step.
  /// Throws Error(kInvalidArgument) for invalid options or another number of groups.
  void setOptions(const std::vector<OptimizerOptions>& groups);

  /// A copy of the state of each parameter, by the names of torch.optim, in the order of the parameters; empty for one
  /// that has never been stepped. Blocks and throws as step() does.
  std::vector<std::map<std::string, at::Tensor>> state();
  /// Sets the states that state() returned; copies the tensors. Blocks and throws as step() does, and throws
  /// Error(kInvalidArgument) for states of other parameters.
  void load(const std::vector<std::map<std::string, at::Tensor>>& states);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace v1
}  // namespace torchrpc
