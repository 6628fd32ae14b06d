#pragma once

// An optimizer beside the parameters that it steps: their state, their options by group, and the choice of kernels.
// It is the value of an RRef, hence reference-counted as LibTorch's values are.
// Threads: any; each call takes `turn` and holds it while tensors change.

#include <ATen/core/ivalue.h>

#include <memory>
#include <string>
#include <vector>

#include "base/sync/mutex.h"
#include "optim/algorithm.h"

namespace torchrpc {

class Optimizer : public torch::CustomClassHolder {
 public:
  struct Group {
    Tensors params;
    Options options;
  };

  /// `turn`: held during a step, by all optimizers that may share parameters; a step counts as a change in place, which
  /// graphs notice that have saved a parameter. Empty: lock-free. Steps of this optimizer still take turns, but not
  /// with those of others, and graphs in flight stay valid; see README.md here for what that means.
  /// Throws Error(kInvalidArgument): an unknown kind or option, a value out of range, a tensor that is no leaf or
  /// stands there twice.
  Optimizer(std::string kind, std::vector<Group> groups, std::shared_ptr<Mutex> turn);

  /// A gradient for each parameter, in the order of the groups; an undefined one passes over its parameter.
  /// Throws Error(kInvalidArgument), before anything has changed, for one that does not fit.
  void step(const Tensors& grads);

  /// A copy of the state of each parameter, in that order; empty for one that has never been stepped.
  std::vector<ParamState> state();
  /// The reverse. Tensors are copied, to the device and dtype of the parameter.
  /// Throws Error(kInvalidArgument), before anything has changed, for a state that does not fit.
  void load(const std::vector<ParamState>& states);

  /// New options for each group; those not named stay. Ignored unless `revision` is the highest so far, so that
  /// messages may overtake each other. Ranges are not checked: torch.optim does not either.
  void setOptions(uint64_t revision, const std::vector<Options>& groups);

  const Tensors& params() const { return params_; }

 private:
  struct Slot {
    size_t group;
    ParamState state;
  };

  void check(const Tensors& grads) const;
  /// What is missing in a state that the algorithm needs, as it is before the first step.
  void complete(ParamState& state, const at::Tensor& param, const Algorithm& algorithm) const;
  ParamState fitted(const ParamState& loaded, size_t param) const;
  void stepGroup(size_t group, const Tensors& grads);

  // constant:
  const std::string kind_;
  const bool lock_free_;
  const std::shared_ptr<Mutex> loop_mutex_;
  Tensors params_;
  // guarded by *loop_mutex_:
  uint64_t revision_ = 0;
  std::vector<Options> options_;
  std::vector<std::unique_ptr<Algorithm>> algorithms_;  // of each group
  std::vector<Slot> slots_;                             // of each parameter
};

}  // namespace torchrpc
