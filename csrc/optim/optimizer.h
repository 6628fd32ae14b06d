#pragma once

// An optimizer on the worker that owns its parameters: their state, their options by group, and the choice of kernels.
// It is the value of an RRef and therefore reference-counted like LibTorch's values.
// Threads: any. Every method holds the step mutex while it reads or changes tensors.

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

  /// `step_mutex` is held during a step; optimizers that may share parameters share it. A step increments the version
  /// counters of the parameters, so the backward pass of a graph that has saved a parameter fails. Null: lock-free.
  /// Then only the steps of this optimizer exclude each other, and graphs that have saved a parameter stay valid;
  /// README.md in this folder explains the consequences. Throws Error(kInvalidArgument) for an unknown kind or option,
  /// a value out of range, or a tensor that is not a leaf or is given twice.
  Optimizer(std::string kind, std::vector<Group> groups, std::shared_ptr<Mutex> step_mutex);

  /// Steps the parameters. `grads` has a gradient for each parameter, in the order of the groups; a parameter whose
  /// gradient is undefined does not change. Throws Error(kInvalidArgument), before any change, for a gradient that does
  /// not fit.
  void step(const Tensors& grads);

  /// Returns a copy of the state of each parameter, in that order; empty for a parameter that has never been stepped.
  std::vector<ParamState> state();
  /// Replaces the state. Tensors are copied to the device and dtype of the parameter.
  /// Throws Error(kInvalidArgument), before any change, for a state that does not fit.
  void load(const std::vector<ParamState>& states);

  /// Sets options of each group; options that are not given stay. Ignored unless `revision` is the highest so far, so
  /// that messages may be reordered. As in torch.optim, ranges are not checked.
  void setOptions(uint64_t revision, const std::vector<Options>& groups);

  const Tensors& params() const { return params_; }

 private:
  struct Slot {
    size_t group;  ///< index
    ParamState state;
  };

  void check(const Tensors& grads) const TORCHRPC_REQUIRES(step_mutex_);
  /// Adds the state tensors that the algorithm needs and `state` lacks, with their initial values.
  static void addMissingState(ParamState& state, const at::Tensor& param, const Algorithm& algorithm);
  /// Returns a copy of a loaded state, checked and converted for the parameter.
  ParamState convertedState(const ParamState& loaded, size_t param) const TORCHRPC_REQUIRES(step_mutex_);
  void stepGroup(size_t group, const Tensors& grads) TORCHRPC_REQUIRES(step_mutex_);

  const std::string kind_;
  const bool lock_free_;
  const std::shared_ptr<Mutex> shared_step_mutex_;
  Mutex& step_mutex_;
  Tensors params_;  ///< constant after construction
  uint64_t revision_ TORCHRPC_GUARDED_BY(step_mutex_) = 0;
  std::vector<Options> options_ TORCHRPC_GUARDED_BY(step_mutex_);                        ///< of each group
  std::vector<std::unique_ptr<Algorithm>> algorithms_ TORCHRPC_GUARDED_BY(step_mutex_);  ///< of each group
  std::vector<Slot> slots_ TORCHRPC_GUARDED_BY(step_mutex_);                             ///< of each parameter
};

}  // namespace torchrpc
