// Adagrad (Duchi, Hazan & Singer 2011, http://jmlr.org/papers/v12/duchi11a.html).

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>

#include "base/error.h"
#include "optim/algorithm.h"

namespace torchrpc {

namespace {

class Adagrad final : public Algorithm {
 public:
  Adagrad(OptionReader& options, Ranges ranges)
      : Algorithm(options),
        lr_(options.number("lr", 1e-2)),
        lr_decay_(options.number("lr_decay", 0)),
        weight_decay_(options.number("weight_decay", 0)),
        initial_(options.number("initial_accumulator_value", 0)),
        eps_(options.number("eps", 1e-10)) {
    checkRange(ranges, lr_ >= 0, "Invalid learning rate: ", lr_);
    checkRange(ranges, lr_decay_ >= 0, "Invalid lr_decay value: ", lr_decay_);
    checkRange(ranges, weight_decay_ >= 0, "Invalid weight_decay value: ", weight_decay_);
    checkRange(ranges, initial_ >= 0, "Invalid initial_accumulator_value value: ", initial_);
    checkRange(ranges, eps_ >= 0, "Invalid epsilon value: ", eps_);
  }

  std::vector<StateTensor> layout() const override { return {kStep, {.name = "sum", .initial = initial_}}; }

  void step(const Batch& batch) const override {
    std::vector<at::Scalar> sizes;
    for (const double step : batch.countSteps()) sizes.emplace_back(-lrOf(step));
    const auto grads = gradients(batch, weight_decay_);
    const auto sums = batch.all("sum");
    at::_foreach_addcmul_(sums, grads, grads, 1);
    const auto deviations = at::_foreach_sqrt(sums);
    at::_foreach_add_(deviations, eps_);
    at::_foreach_addcdiv_(batch.params, grads, deviations, sizes);
  }

  bool hasFused() const override { return true; }

  void stepFused(const Batch& batch) const override {
    const auto steps = batch.all("step");
    at::_foreach_add_(steps, 1);
    at::_fused_adagrad_(
        batch.params, batch.grads, batch.all("sum"), steps, lr_, lr_decay_, weight_decay_, eps_, maximize_);
  }

  bool supportsSparse() const override { return true; }

  void stepSparse(const at::Tensor& param, const at::Tensor& sparse, ParamState& state) const override {
    if (weight_decay_ != 0) {
      throw Error(ErrorCode::kInvalidArgument, "weight_decay option is not compatible with sparse gradients");
    }
    const auto& sum = state.at("sum");
    const double lr = lrOf(state.at("step").add_(1).item<double>());
    // The update is not linear in the gradient, so each index must occur once.
    const auto grad = (maximize_ ? sparse.neg() : sparse).coalesce();
    const auto values = grad._values();
    const auto with = [&](const at::Tensor& other) {
      return at::_sparse_coo_tensor_unsafe(
          grad._indices(), other, grad.sizes(), other.options().layout(at::kSparse), /*is_coalesced=*/true);
    };
    sum.add_(with(values.pow(2)));
    const auto deviations = sum.sparse_mask(grad)._values().sqrt_().add_(eps_);
    param.add_(with(values.div(deviations)), -lr);
  }

 private:
  double lrOf(double step) const { return lr_ / (1 + (step - 1) * lr_decay_); }

  const double lr_;
  const double lr_decay_;
  const double weight_decay_;
  const double initial_;
  const double eps_;
};

}  // namespace

std::unique_ptr<Algorithm> makeAdagrad(OptionReader& options, Ranges ranges) {
  return std::make_unique<Adagrad>(options, ranges);
}

}  // namespace torchrpc
