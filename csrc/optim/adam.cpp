// Adam and AdamW (Kingma & Ba 2014, arXiv:1412.6980; Loshchilov & Hutter 2017, arXiv:1711.05101), and their AMSGrad
// variants.

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <cmath>

#include "optim/algorithm.h"

namespace torchrpc {

namespace {

class Adam final : public Algorithm {
 public:
  Adam(OptionReader& options, Ranges ranges, bool decoupled)
      : Algorithm(options),
        decoupled_(options.flag("decoupled_weight_decay", decoupled)),
        lr_(options.number("lr", 1e-3)),
        betas_(options.pair("betas", {0.9, 0.999})),
        eps_(options.number("eps", 1e-8)),
        weight_decay_(options.number("weight_decay", decoupled ? 1e-2 : 0)),
        amsgrad_(options.flag("amsgrad", false)) {
    const auto [beta1, beta2] = betas_;
    checkRange(ranges, lr_ >= 0, "Invalid learning rate: ", lr_);
    checkRange(ranges, eps_ >= 0, "Invalid epsilon value: ", eps_);
    checkRange(ranges, 0 <= beta1 && beta1 < 1, "Invalid beta parameter at index 0: ", beta1);
    checkRange(ranges, 0 <= beta2 && beta2 < 1, "Invalid beta parameter at index 1: ", beta2);
    checkRange(ranges, weight_decay_ >= 0, "Invalid weight_decay value: ", weight_decay_);
  }

  std::vector<StateTensor> layout() const override {
    return {kStep, {.name = "exp_avg"}, {.name = "exp_avg_sq"}, {.name = "max_exp_avg_sq", .needed = amsgrad_}};
  }

  void step(const Batch& batch) const override {
    const auto [beta1, beta2] = betas_;
    const auto steps = batch.countSteps();
    if (decoupled_ && weight_decay_ != 0) at::_foreach_mul_(batch.params, 1 - lr_ * weight_decay_);
    const auto grads = gradients(batch, decoupled_ ? 0 : weight_decay_);
    const auto averages = batch.all("exp_avg");
    auto squares = batch.all("exp_avg_sq");
    at::_foreach_lerp_(averages, grads, 1 - beta1);
    at::_foreach_mul_(squares, beta2);
    at::_foreach_addcmul_(squares, grads, grads, 1 - beta2);
    if (amsgrad_) {
      const auto largest = batch.all("max_exp_avg_sq");
      at::_foreach_maximum_(largest, squares);
      squares = largest;
    }
    std::vector<at::Scalar> sizes, corrections;
    for (const double step : steps) {
      sizes.emplace_back(-lr_ / (1 - std::pow(beta1, step)));
      corrections.emplace_back(std::pow(1 - std::pow(beta2, step), 0.5));
    }
    const auto denominators = at::_foreach_sqrt(squares);
    at::_foreach_div_(denominators, corrections);
    at::_foreach_add_(denominators, eps_);
    at::_foreach_addcdiv_(batch.params, averages, denominators, sizes);
  }

  bool hasFused() const override { return true; }

  void stepFused(const Batch& batch) const override {
    const auto steps = batch.all("step");
    at::_foreach_add_(steps, 1);
    const auto run = [&](auto kernel) {
      kernel(
          batch.params, batch.grads, batch.all("exp_avg"), batch.all("exp_avg_sq"),
          amsgrad_ ? batch.all("max_exp_avg_sq") : Tensors(), steps, lr_, betas_.first, betas_.second, weight_decay_,
          eps_, amsgrad_, maximize_);
    };
    if (decoupled_) {
      run([](const auto&... args) { at::_fused_adamw_(args...); });
    } else {
      run([](const auto&... args) { at::_fused_adam_(args...); });
    }
  }

 private:
  const bool decoupled_;  ///< weight decay is not part of the gradient
  const double lr_;
  const std::pair<double, double> betas_;
  const double eps_;
  const double weight_decay_;
  const bool amsgrad_;
};

}  // namespace

std::unique_ptr<Algorithm> makeAdam(OptionReader& options, Ranges ranges) {
  return std::make_unique<Adam>(options, ranges, false);
}

std::unique_ptr<Algorithm> makeAdamW(OptionReader& options, Ranges ranges) {
  return std::make_unique<Adam>(options, ranges, true);
}

}  // namespace torchrpc
