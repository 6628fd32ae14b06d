#pragma once

// What one kind of optimizer does to parameters that it is given with their gradients: the arithmetic of torch.optim,
// operation by operation, so that results agree to the last bit where no fused kernel is used. An algorithm is
// immutable: other options make another one. It keeps no tensors.
// See README.md here for which kernels run when, and why.

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "optim/options.h"

namespace torchrpc {

/// The tensors that belong to one parameter, named as in torch.optim.
using ParamState = std::map<std::string, at::Tensor>;
using Tensors = std::vector<at::Tensor>;

/// A tensor of a parameter's state.
struct StateTensor {
  const char* name;
  double initial = 0;
  bool needed = true;   ///< with these options, before the first step
  bool scalar = false;  ///< one number, not of the parameter's shape
};
constexpr StateTensor kStep{.name = "step", .scalar = true};

/// Parameters of one device and dtype with dense gradients of the same; complex ones as pairs of real numbers.
struct Batch {
  Tensors params;
  Tensors grads;
  std::vector<ParamState*> states;
  bool complex = false;

  /// The state tensors of that name, one for each parameter.
  Tensors all(const std::string& name) const;
  /// Counts a step of each parameter; gives their numbers, from 1.
  std::vector<double> countSteps() const;
};

class Algorithm {
 public:
  virtual ~Algorithm() = default;
  virtual std::vector<StateTensor> layout() const = 0;
  virtual void step(const Batch& batch) const = 0;

  /// Whether there is a fused kernel; `stepFused` takes a batch of which all tensors have the same strides.
  virtual bool hasFused() const { return false; }
  virtual void stepFused(const Batch&) const {}

  /// The update by a sparse gradient.
  virtual bool takesSparse() const { return false; }
  virtual void stepSparse(const at::Tensor&, const at::Tensor&, ParamState&) const {}

  const std::string& name() const { return name_; }
  /// What the user says: use the fused kernel wherever there is one, nowhere, or as seems best.
  std::optional<bool> wantsFused() const { return fused_; }

 protected:
  explicit Algorithm(OptionReader& options);
  /// The gradients to descend along: negated for `maximize`, with the decay of the weights added. Not to be changed:
  /// they may be the batch's own.
  Tensors gradients(const Batch& batch, double weight_decay) const;

  const std::string name_;
  const bool maximize_;
  const std::optional<bool> fused_;
};

/// Whether options must be in the ranges that the constructors of torch.optim demand (which schedulers may leave).
enum class Ranges { kChecked, kFree };

/// `kind` is the name of a class of torch.optim. Throws Error(kInvalidArgument), for options out of range with the
/// texts of torch.optim.
std::unique_ptr<Algorithm> makeAlgorithm(const std::string& kind, const Options& options, Ranges ranges);

/// Throws Error(kInvalidArgument) with `text` and the value, unless `valid` or the ranges are free.
void demand(Ranges ranges, bool valid, const char* text, double value);

using AlgorithmMaker = std::unique_ptr<Algorithm> (*)(OptionReader& options, Ranges ranges);
std::unique_ptr<Algorithm> makeSgd(OptionReader& options, Ranges ranges);
std::unique_ptr<Algorithm> makeAdam(OptionReader& options, Ranges ranges);
std::unique_ptr<Algorithm> makeAdamW(OptionReader& options, Ranges ranges);
std::unique_ptr<Algorithm> makeAdagrad(OptionReader& options, Ranges ranges);
std::unique_ptr<Algorithm> makeRmsprop(OptionReader& options, Ranges ranges);
std::unique_ptr<Algorithm> makeAdadelta(OptionReader& options, Ranges ranges);
std::unique_ptr<Algorithm> makeAdamax(OptionReader& options, Ranges ranges);
std::unique_ptr<Algorithm> makeRprop(OptionReader& options, Ranges ranges);

}  // namespace torchrpc
