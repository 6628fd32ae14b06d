// Adadelta (Zeiler 2012, arXiv:1212.5701).

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>

#include "optim/algorithm.h"

namespace torchrpc {

namespace {

class Adadelta final : public Algorithm {
 public:
  Adadelta(OptionReader& options, Ranges ranges)
      : Algorithm(options),
        lr_(options.number("lr", 1.0)),
        rho_(options.number("rho", 0.9)),
        eps_(options.number("eps", 1e-6)),
        weight_decay_(options.number("weight_decay", 0)) {
    checkRange(ranges, lr_ >= 0, "Invalid learning rate: ", lr_);
    checkRange(ranges, 0 <= rho_ && rho_ <= 1, "Invalid rho value: ", rho_);
    checkRange(ranges, eps_ >= 0, "Invalid epsilon value: ", eps_);
    checkRange(ranges, weight_decay_ >= 0, "Invalid weight_decay value: ", weight_decay_);
  }

  std::vector<StateTensor> layout() const override { return {kStep, {.name = "square_avg"}, {.name = "acc_delta"}}; }

  void step(const Batch& batch) const override {
    batch.countSteps();
    const auto grads = gradients(batch, weight_decay_);
    const auto squares = batch.all("square_avg");
    const auto accumulated = batch.all("acc_delta");
    at::_foreach_mul_(squares, rho_);
    at::_foreach_addcmul_(squares, grads, grads, 1 - rho_);
    const auto deviations = at::_foreach_add(squares, eps_);
    at::_foreach_sqrt_(deviations);
    const auto deltas = at::_foreach_add(accumulated, eps_);
    at::_foreach_sqrt_(deltas);
    at::_foreach_div_(deltas, deviations);
    at::_foreach_mul_(deltas, grads);
    at::_foreach_mul_(accumulated, rho_);
    at::_foreach_addcmul_(accumulated, deltas, deltas, 1 - rho_);
    at::_foreach_add_(batch.params, deltas, -lr_);
  }

 private:
  const double lr_;
  const double rho_;
  const double eps_;
  const double weight_decay_;
};

}  // namespace

std::unique_ptr<Algorithm> makeAdadelta(OptionReader& options, Ranges ranges) {
  return std::make_unique<Adadelta>(options, ranges);
}

}  // namespace torchrpc
