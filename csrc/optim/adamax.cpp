// Adamax: Adam with the infinity norm (Kingma & Ba 2014, arXiv:1412.6980).

#include <ATen/ops/_foreach_abs.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>

#include <cmath>

#include "optim/algorithm.h"

namespace torchrpc {

namespace {

class Adamax final : public Algorithm {
 public:
  Adamax(OptionReader& options, Ranges ranges)
      : Algorithm(options),
        lr_(options.number("lr", 2e-3)),
        betas_(options.pair("betas", {0.9, 0.999})),
        eps_(options.number("eps", 1e-8)),
        weight_decay_(options.number("weight_decay", 0)) {
    const auto [beta1, beta2] = betas_;
    checkRange(ranges, lr_ >= 0, "Invalid learning rate: ", lr_);
    checkRange(ranges, eps_ >= 0, "Invalid epsilon value: ", eps_);
    checkRange(ranges, 0 <= beta1 && beta1 < 1, "Invalid beta parameter at index 0: ", beta1);
    checkRange(ranges, 0 <= beta2 && beta2 < 1, "Invalid beta parameter at index 1: ", beta2);
    checkRange(ranges, weight_decay_ >= 0, "Invalid weight_decay value: ", weight_decay_);
  }

  std::vector<StateTensor> layout() const override { return {kStep, {.name = "exp_avg"}, {.name = "exp_inf"}}; }

  void step(const Batch& batch) const override {
    const auto [beta1, beta2] = betas_;
    std::vector<at::Scalar> sizes;
    for (const double step : batch.countSteps()) sizes.emplace_back(-lr_ / (1 - std::pow(beta1, step)));
    const auto grads = gradients(batch, weight_decay_);
    const auto averages = batch.all("exp_avg");
    const auto norms = batch.all("exp_inf");
    at::_foreach_lerp_(averages, grads, 1 - beta1);
    at::_foreach_mul_(norms, beta2);
    const auto magnitudes = at::_foreach_abs(grads);
    at::_foreach_add_(magnitudes, eps_);
    at::_foreach_maximum_(norms, magnitudes);
    at::_foreach_addcdiv_(batch.params, averages, norms, sizes);
  }

 private:
  const double lr_;
  const std::pair<double, double> betas_;
  const double eps_;
  const double weight_decay_;
};

}  // namespace

std::unique_ptr<Algorithm> makeAdamax(OptionReader& options, Ranges ranges) {
  return std::make_unique<Adamax>(options, ranges);
}

}  // namespace torchrpc
