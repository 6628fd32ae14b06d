// Resilient backpropagation (Riedmiller & Braun 1993, doi:10.1109/ICNN.1993.298623).

#include "base/error.h"
#include "optim/algorithm.h"

namespace torchrpc {

namespace {

class Rprop final : public Algorithm {
 public:
  Rprop(OptionReader& options, Ranges ranges)
      : Algorithm(options),
        lr_(options.number("lr", 1e-2)),
        etas_(options.pair("etas", {0.5, 1.2})),
        step_sizes_(options.pair("step_sizes", {1e-6, 50})) {
    checkRange(ranges, lr_ >= 0, "Invalid learning rate: ", lr_);
    if (ranges == Ranges::kChecked && !(0 < etas_.first && etas_.first < 1 && 1 < etas_.second)) {
      throw Error(
          ErrorCode::kInvalidArgument,
          "Invalid eta values: " + std::to_string(etas_.first) + ", " + std::to_string(etas_.second));
    }
  }

  std::vector<StateTensor> layout() const override {
    return {kStep, {.name = "prev"}, {.name = "step_size", .initial = lr_}};
  }

  void step(const Batch& batch) const override {
    batch.countSteps();
    const auto grads = gradients(batch, 0);
    const auto previous = batch.all("prev");
    const auto sizes = batch.all("step_size");
    for (size_t i = 0; i < grads.size(); ++i) update(batch.params[i], grads[i], previous[i], sizes[i]);
  }

 private:
  void update(
      const at::Tensor& param, const at::Tensor& grad, const at::Tensor& previous, const at::Tensor& size) const {
    // Each step size is multiplied by one eta where the gradient kept its sign, by the other where the sign changed.
    const auto factor = grad.mul(previous).sign_();
    factor.masked_fill_(factor.gt(0), etas_.second);
    factor.masked_fill_(factor.lt(0), etas_.first);
    factor.masked_fill_(factor.eq(0), 1);
    size.mul_(factor).clamp_(step_sizes_.first, step_sizes_.second);
    previous.copy_(grad).masked_fill_(factor.eq(etas_.first), 0);
    param.addcmul_(previous.sign(), size, -1);
  }

  const double lr_;
  const std::pair<double, double> etas_;
  const std::pair<double, double> step_sizes_;
};

}  // namespace

std::unique_ptr<Algorithm> makeRprop(OptionReader& options, Ranges ranges) {
  return std::make_unique<Rprop>(options, ranges);
}

}  // namespace torchrpc
