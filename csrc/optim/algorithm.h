#pragma once

// The update rule of one kind of optimizer: the arithmetic of torch.optim, operation by operation, so that results
// agree to the last bit where no fused kernel is used. An Algorithm is immutable: changed options need a new one. It
// keeps no tensors; parameters, gradients and state are arguments. README.md in this folder says which kernels run
// when, and why.

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
  bool needed = true;   ///< must exist before the first step with these options
  bool scalar = false;  ///< one number instead of a tensor of the parameter's shape
};
constexpr StateTensor kStep{.name = "step", .scalar = true};

/// Parameters of one device and dtype with dense gradients; complex ones are viewed as pairs of real numbers.
struct Batch {
  Tensors params;
  Tensors grads;
  std::vector<ParamState*> states;
  bool complex = false;

  /// The state tensors of that name, one for each parameter.
  Tensors all(const std::string& name) const;
  /// Increments the step count of each parameter; returns the new counts, which start at 1.
  std::vector<double> countSteps() const;
};

class Algorithm {
 public:
  virtual ~Algorithm() = default;
  virtual std::vector<StateTensor> layout() const = 0;
  virtual void step(const Batch& batch) const = 0;

  /// Whether a fused kernel exists. All tensors of a parameter in the batch of stepFused() must have equal strides.
  virtual bool hasFused() const { return false; }
  virtual void stepFused(const Batch&) const {}

  /// Whether sparse gradients are supported. stepSparse() updates a parameter with such a gradient.
  virtual bool supportsSparse() const { return false; }
  virtual void stepSparse(const at::Tensor&, const at::Tensor&, ParamState&) const {}

  const std::string& name() const { return name_; }
  /// The option `fused`: use the fused kernel wherever possible, never, or (not set) where it is known to be faster.
  std::optional<bool> wantsFused() const { return fused_; }

 protected:
  explicit Algorithm(OptionReader& options);
  /// Returns the gradients of the update: negated for `maximize`, with weight decay added. The caller must not modify
  /// them, because they may be the batch's own tensors.
  Tensors gradients(const Batch& batch, double weight_decay) const;

  const std::string name_;
  const bool maximize_;
  const std::optional<bool> fused_;
};

/// Whether options must be in the ranges that the constructors of torch.optim check. Schedulers may set values outside
/// of these ranges.
enum class Ranges { kChecked, kUnchecked };

/// `kind` is the name of a class of torch.optim. Throws Error(kInvalidArgument); for options out of range, the texts
/// are those of torch.optim.
std::unique_ptr<Algorithm> makeAlgorithm(const std::string& kind, const Options& options, Ranges ranges);

/// Throws Error(kInvalidArgument) with `text` and the value if the value is not valid and ranges are checked.
void checkRange(Ranges ranges, bool valid, const char* text, double value);

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
