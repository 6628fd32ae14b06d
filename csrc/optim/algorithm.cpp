#include "optim/algorithm.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/StringUtil.h>

#include "base/error.h"

namespace torchrpc {

namespace {

const std::map<std::string, AlgorithmMaker>& makers() {
  static const std::map<std::string, AlgorithmMaker> all{
      {"SGD", makeSgd},         {"Adam", makeAdam},         {"AdamW", makeAdamW},   {"Adagrad", makeAdagrad},
      {"RMSprop", makeRmsprop}, {"Adadelta", makeAdadelta}, {"Adamax", makeAdamax}, {"Rprop", makeRprop},
  };
  return all;
}

}  // namespace

Tensors Batch::all(const std::string& name) const {
  Tensors out;
  out.reserve(states.size());
  for (auto* state : states) {
    const auto& tensor = state->at(name);
    out.push_back(complex && tensor.is_complex() ? at::view_as_real(tensor) : tensor);
  }
  return out;
}

std::vector<double> Batch::countSteps() const {
  std::vector<double> out;
  out.reserve(states.size());
  for (auto* state : states) out.push_back(state->at("step").add_(1).item<double>());
  return out;
}

Algorithm::Algorithm(OptionReader& options)
    : name_(options.optimizer()), maximize_(options.flag("maximize", false)), fused_(options.choice("fused")) {
  options.choice("foreach");  // accepted and ignored: the arithmetic is the same
}

Tensors Algorithm::gradients(const Batch& batch, double weight_decay) const {
  if (maximize_) {
    auto grads = at::_foreach_neg(batch.grads);
    if (weight_decay != 0) at::_foreach_add_(grads, batch.params, weight_decay);
    return grads;
  }
  return weight_decay != 0 ? at::_foreach_add(batch.grads, batch.params, weight_decay) : batch.grads;
}

std::unique_ptr<Algorithm> makeAlgorithm(const std::string& kind, const Options& options, Ranges ranges) {
  const auto maker = makers().find(kind);
  if (maker == makers().end()) {
    std::string all;
    for (const auto& [name, _] : makers()) all += (all.empty() ? "" : ", ") + name;
    throw Error(
        ErrorCode::kInvalidArgument, "no optimizer named '" + kind + "' that works without Python; there are " + all);
  }
  OptionReader reader(kind, options);
  auto algorithm = maker->second(reader, ranges);
  reader.expectNoOther();
  return algorithm;
}

void checkRange(Ranges ranges, bool valid, const char* text, double value) {
  if (ranges == Ranges::kChecked && !valid) throw Error(ErrorCode::kInvalidArgument, c10::str(text, value));
}

}  // namespace torchrpc
