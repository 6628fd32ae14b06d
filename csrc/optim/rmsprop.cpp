// RMSprop (G. Hinton's lectures); centered as in Graves 2013 (arXiv:1308.0850).

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>

#include "optim/algorithm.h"

namespace torchrpc {

namespace {

class Rmsprop final : public Algorithm {
 public:
  Rmsprop(OptionReader& options, Ranges ranges)
      : Algorithm(options),
        lr_(options.number("lr", 1e-2)),
        alpha_(options.number("alpha", 0.99)),
        eps_(options.number("eps", 1e-8)),
        weight_decay_(options.number("weight_decay", 0)),
        momentum_(options.number("momentum", 0)),
        centered_(options.flag("centered", false)) {
    checkRange(ranges, lr_ >= 0, "Invalid learning rate: ", lr_);
    checkRange(ranges, eps_ >= 0, "Invalid epsilon value: ", eps_);
    checkRange(ranges, momentum_ >= 0, "Invalid momentum value: ", momentum_);
    checkRange(ranges, weight_decay_ >= 0, "Invalid weight_decay value: ", weight_decay_);
    checkRange(ranges, alpha_ >= 0, "Invalid alpha value: ", alpha_);
  }

  std::vector<StateTensor> layout() const override {
    return {
        kStep,
        {.name = "square_avg"},
        {.name = "momentum_buffer", .needed = momentum_ > 0},
        {.name = "grad_avg", .needed = centered_}};
  }

  void step(const Batch& batch) const override {
    batch.countSteps();
    const auto grads = gradients(batch, weight_decay_);
    const auto squares = batch.all("square_avg");
    at::_foreach_mul_(squares, alpha_);
    at::_foreach_addcmul_(squares, grads, grads, 1 - alpha_);
    const auto deviations = deviationsOf(batch, grads, squares);
    if (momentum_ > 0) {
      const auto buffers = batch.all("momentum_buffer");
      at::_foreach_mul_(buffers, momentum_);
      at::_foreach_addcdiv_(buffers, grads, deviations);
      at::_foreach_add_(batch.params, buffers, -lr_);
    } else {
      at::_foreach_addcdiv_(batch.params, grads, deviations, -lr_);
    }
  }

 private:
  Tensors deviationsOf(const Batch& batch, const Tensors& grads, const Tensors& squares) const {
    Tensors out;
    if (centered_) {
      const auto averages = batch.all("grad_avg");
      at::_foreach_lerp_(averages, grads, 1 - alpha_);
      out = at::_foreach_addcmul(squares, averages, averages, -1);
      at::_foreach_sqrt_(out);
    } else {
      out = at::_foreach_sqrt(squares);
    }
    at::_foreach_add_(out, eps_);
    return out;
  }

  const double lr_;
  const double alpha_;
  const double eps_;
  const double weight_decay_;
  const double momentum_;
  const bool centered_;
};

}  // namespace

std::unique_ptr<Algorithm> makeRmsprop(OptionReader& options, Ranges ranges) {
  return std::make_unique<Rmsprop>(options, ranges);
}

}  // namespace torchrpc
