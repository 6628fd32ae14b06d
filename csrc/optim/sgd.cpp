// Stochastic gradient descent, with momentum and Nesterov's variant of it.

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include "base/error.h"
#include "optim/algorithm.h"

namespace torchrpc {

namespace {

constexpr auto kBuffer = "momentum_buffer";

class Sgd final : public Algorithm {
 public:
  Sgd(OptionReader& options, Ranges ranges)
      : Algorithm(options),
        lr_(options.number("lr", 1e-3)),
        momentum_(options.number("momentum", 0)),
        dampening_(options.number("dampening", 0)),
        weight_decay_(options.number("weight_decay", 0)),
        nesterov_(options.flag("nesterov", false)) {
    checkRange(ranges, lr_ >= 0, "Invalid learning rate: ", lr_);
    checkRange(ranges, momentum_ >= 0, "Invalid momentum value: ", momentum_);
    checkRange(ranges, weight_decay_ >= 0, "Invalid weight_decay value: ", weight_decay_);
    if (ranges == Ranges::kChecked && nesterov_ && (momentum_ <= 0 || dampening_ != 0)) {
      throw Error(ErrorCode::kInvalidArgument, "Nesterov momentum requires a momentum and zero dampening");
    }
  }

  std::vector<StateTensor> layout() const override { return {{.name = kBuffer, .needed = false}}; }

  void step(const Batch& batch) const override {
    auto grads = gradients(batch, weight_decay_);
    if (momentum_ != 0) {
      const auto buffers = updateBuffers(batch, grads);
      if (nesterov_) {
        grads = at::_foreach_add(grads, buffers, momentum_);
      } else {
        grads = buffers;
      }
    }
    at::_foreach_add_(batch.params, grads, -lr_);
  }

  bool hasFused() const override { return true; }

  void stepFused(const Batch& batch) const override {
    // The kernel initializes the momentum buffers of a batch either all or not at all.
    Batch first, later;
    for (size_t i = 0; i < batch.params.size(); ++i) {
      auto& state = *batch.states[i];
      const bool is_first = momentum_ != 0 && !state.count(kBuffer);
      if (is_first) state[kBuffer] = at::empty_like(batch.params[i]);
      auto& part = is_first ? first : later;
      part.params.push_back(batch.params[i]);
      part.grads.push_back(batch.grads[i]);
      part.states.push_back(&state);
    }
    runFused(first, true);
    runFused(later, false);
  }

  bool supportsSparse() const override { return true; }

  void stepSparse(const at::Tensor& param, const at::Tensor& sparse, ParamState& state) const override {
    auto grad = maximize_ ? sparse.neg() : sparse;
    if (weight_decay_ != 0) grad = grad.add(param, weight_decay_);
    if (momentum_ != 0) {
      auto& buffer = state[kBuffer];
      buffer = buffer.defined() ? buffer.mul_(momentum_).add_(grad, 1 - dampening_) : grad.clone();
      grad = nesterov_ ? grad.add(buffer, momentum_) : buffer;
    }
    param.add_(grad, -lr_);
  }

 private:
  Tensors updateBuffers(const Batch& batch, const Tensors& grads) const {
    Tensors buffers;
    for (size_t i = 0; i < grads.size(); ++i) {
      // The first value of a buffer is the gradient.
      const auto [entry, is_first] = batch.states[i]->try_emplace(kBuffer);
      auto& buffer = entry->second;
      if (is_first) {
        const auto real = at::empty_like(batch.params[i]).copy_(grads[i]);
        buffer = batch.complex ? at::view_as_complex(real) : real;
      } else {
        const auto real = batch.complex ? at::view_as_real(buffer) : buffer;
        real.mul_(momentum_).add_(grads[i], 1 - dampening_);
      }
      buffers.push_back(batch.complex ? at::view_as_real(buffer) : buffer);
    }
    return buffers;
  }

  void runFused(const Batch& batch, bool first) const {
    if (batch.params.empty()) return;
    const auto buffers = momentum_ != 0 ? batch.all(kBuffer) : Tensors();
    at::_fused_sgd_(
        batch.params, batch.grads, buffers, weight_decay_, momentum_, lr_, dampening_, nesterov_, maximize_, first);
  }

  const double lr_;
  const double momentum_;
  const double dampening_;
  const double weight_decay_;
  const bool nesterov_;
};

}  // namespace

std::unique_ptr<Algorithm> makeSgd(OptionReader& options, Ranges ranges) {
  return std::make_unique<Sgd>(options, ranges);
}

}  // namespace torchrpc
