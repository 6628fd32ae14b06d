#include "optim/optimizer.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "base/error.h"
#include "base/executor/thread_pool.h"

namespace torchrpc {

namespace {

/// A scoped lock that waits in a BlockingScope, so that another pool thread can run meanwhile.
class TORCHRPC_ANNOTATE(scoped_lockable) StepLock {
 public:
  explicit StepLock(Mutex& mutex) TORCHRPC_ANNOTATE(acquire_capability(mutex)) : mutex_(mutex) {
    if (mutex.try_lock()) return;
    const ThreadPool::BlockingScope blocking;
    mutex.lock();
  }
  ~StepLock() TORCHRPC_ANNOTATE(release_capability()) { mutex_.unlock(); }
  StepLock(const StepLock&) = delete;
  StepLock& operator=(const StepLock&) = delete;

 private:
  Mutex& mutex_;
};

/// Whether the fused kernel can be used. It assumes that all tensors of a parameter have the same dense memory layout.
bool canUseFused(const at::Tensor& param, const at::Tensor& grad, const ParamState& state, const Algorithm& algorithm) {
  if (!algorithm.hasFused() || algorithm.wantsFused() == false) return false;
  if (!param.device().is_cpu() && !param.device().is_cuda()) return false;
  const auto sameLayout = [&](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && tensor.dtype() == param.dtype() && tensor.strides() == param.strides();
  };
  if (!param.is_non_overlapping_and_dense() || !sameLayout(grad)) return false;
  for (const auto& [name, tensor] : state) {
    if (name != kStep.name && !sameLayout(tensor)) return false;
  }
  const auto type = param.scalar_type();
  if (type == at::kFloat || type == at::kDouble) return true;
  return algorithm.wantsFused() == true && (type == at::kHalf || type == at::kBFloat16);
}

at::Tensor realOf(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

/// Whether a batch is large enough. On a CPU, a batch should fit in the cache from one operation to the next; on other
/// devices batches are not limited, because each kernel launch has a cost.
bool isFull(int64_t elements, const at::Device& device) { return device.is_cpu() && elements >= 16384; }

}  // namespace

Optimizer::Optimizer(std::string kind, std::vector<Group> groups, std::shared_ptr<Mutex> step_mutex)
    : kind_(std::move(kind)),
      lock_free_(!step_mutex),
      shared_step_mutex_(step_mutex ? std::move(step_mutex) : std::make_shared<Mutex>()),
      step_mutex_(*shared_step_mutex_) {
  std::set<const at::TensorImpl*> seen;
  for (auto& group : groups) {
    for (auto& param : group.params) {
      const auto which = "parameter " + std::to_string(params_.size());
      if (!param.defined()) throwInvalidArgument(which + " is an undefined tensor");
      if (!param.is_leaf())
        throwInvalidArgument("can't optimize a non-leaf Tensor: " + which + " is the result of an operation");
      if (!seen.insert(param.unsafeGetTensorImpl()).second) {
        throwInvalidArgument(
            "some parameters appear twice: " + which + " is the same tensor as one before it; give each once");
      }
      slots_.push_back({algorithms_.size(), {}});
      params_.push_back(std::move(param));
    }
    algorithms_.push_back(makeAlgorithm(kind_, group.options, Ranges::kChecked));
    options_.push_back(std::move(group.options));
  }
  if (algorithms_.empty()) throwInvalidArgument("optimizer got an empty parameter list");
}

void Optimizer::step(const Tensors& grads) {
  const c10::NoGradGuard no_grad;
  const StepLock lock(step_mutex_);
  check(grads);
  for (size_t group = 0; group < algorithms_.size(); ++group) stepGroup(group, grads);
}

void Optimizer::check(const Tensors& grads) const {
  if (grads.size() != params_.size()) {
    throwInvalidArgument(c10::str("there are ", params_.size(), " parameters, but ", grads.size(), " gradients"));
  }
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) continue;
    const bool sparse = grads[i].layout() != at::kStrided;
    if (sparse && !(grads[i].is_sparse() && algorithms_[slots_[i].group]->supportsSparse())) {
      const auto instead = kind_.starts_with("Adam") && kind_ != "Adamax" ? ", please consider SparseAdam instead" : "";
      throwInvalidArgument(kind_ + " does not support sparse gradients" + instead);
    }
    if (grads[i].sizes() != params_[i].sizes() || grads[i].device() != params_[i].device()) {
      throwInvalidArgument(c10::str(
          "the gradient of parameter ", i, " has size ", grads[i].sizes(), " on ", grads[i].device(),
          ", the parameter has size ", params_[i].sizes(), " on ", params_[i].device()));
    }
  }
}

void Optimizer::stepGroup(size_t group, const Tensors& grads) {
  const auto& algorithm = *algorithms_[group];
  struct Run {
    Batch batch;
    bool fused = false;
    int64_t elements = 0;
  };
  std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, c10::ScalarType, c10::ScalarType, bool>, Run> runs;
  const auto flush = [&](Run& run) {
    run.fused ? algorithm.stepFused(run.batch) : algorithm.step(run.batch);
    run.batch = {};
    run.elements = 0;
  };
  for (size_t i = 0; i < params_.size(); ++i) {
    if (slots_[i].group != group || !grads[i].defined()) continue;
    const auto& grad = grads[i];
    // An alias shares the memory but not the version counter, by which graphs detect changes in place.
    const auto param = lock_free_ ? params_[i].variable_data() : params_[i];
    auto& state = slots_[i].state;
    addMissingState(state, param, algorithm);
    if (grad.is_sparse()) {
      algorithm.stepSparse(param, grad, state);
      continue;
    }
    const bool fused = canUseFused(param, grad, state, algorithm);
    const auto device = param.device();
    auto& run = runs[{device.type(), device.index(), param.scalar_type(), grad.scalar_type(), fused}];
    run.fused = fused;
    run.batch.complex = param.is_complex();
    run.batch.params.push_back(realOf(param));
    run.batch.grads.push_back(realOf(grad));
    run.batch.states.push_back(&state);
    if (fused) param.unsafeGetTensorImpl()->bump_version();  // the fused kernels do not bump it
    run.elements += param.numel();
    if (isFull(run.elements, device)) flush(run);
  }
  for (auto& [_, run] : runs) {
    if (!run.batch.params.empty()) flush(run);
  }
}

void Optimizer::addMissingState(ParamState& state, const at::Tensor& param, const Algorithm& algorithm) {
  for (const auto& part : algorithm.layout()) {
    if (!part.needed || state.count(part.name)) continue;
    if (part.scalar) {
      // Fused kernels need the step count on the device; otherwise it stays on the CPU, because to read it from the
      // device would block.
      const bool on_device = algorithm.hasFused() && param.is_cuda() && algorithm.wantsFused() != false;
      state[part.name] = at::zeros({}, at::TensorOptions(at::kFloat).device(on_device ? param.device() : at::kCPU));
    } else {
      auto& tensor = state[part.name] = at::empty_like(param);
      realOf(tensor).fill_(part.initial);
    }
  }
}

std::vector<ParamState> Optimizer::state() {
  const c10::NoGradGuard no_grad;
  const StepLock lock(step_mutex_);
  std::vector<ParamState> out;
  for (const auto& slot : slots_) {
    auto& copy = out.emplace_back();
    for (const auto& [name, tensor] : slot.state) copy[name] = tensor.clone();
  }
  return out;
}

void Optimizer::load(const std::vector<ParamState>& states) {
  const c10::NoGradGuard no_grad;
  const StepLock lock(step_mutex_);
  if (states.size() != params_.size()) {
    throwInvalidArgument(c10::str("there are ", params_.size(), " parameters, but states of ", states.size()));
  }
  std::vector<ParamState> converted;
  for (size_t i = 0; i < states.size(); ++i) converted.push_back(convertedState(states[i], i));
  for (size_t i = 0; i < states.size(); ++i) slots_[i].state = std::move(converted[i]);
}

ParamState Optimizer::convertedState(const ParamState& loaded, size_t param) const {
  if (loaded.empty()) return {};
  const auto& algorithm = *algorithms_[slots_[param].group];
  const auto layout = algorithm.layout();
  ParamState out;
  for (const auto& [name, tensor] : loaded) {
    const auto part =
        std::find_if(layout.begin(), layout.end(), [&](const auto& candidate) { return name == candidate.name; });
    if (part == layout.end())
      throwInvalidArgument(kind_ + " keeps no '" + name + "' of a parameter: is the state another optimizer's?");
    const auto sizes = part->scalar ? at::IntArrayRef() : params_[param].sizes();
    if (!tensor.defined() || tensor.sizes() != sizes) {
      throwInvalidArgument(c10::str("'", name, "' of parameter ", param, " must be a tensor of size ", sizes));
    }
    if (!part->scalar)
      out[name] = at::empty_like(params_[param]).copy_(tensor.is_sparse() ? tensor.to_dense() : tensor);
  }
  addMissingState(out, params_[param], algorithm);
  for (const auto& part : layout) {
    if (part.scalar && loaded.count(part.name)) out[part.name].copy_(loaded.at(part.name));
  }
  return out;
}

void Optimizer::setOptions(uint64_t revision, const std::vector<Options>& groups) {
  const StepLock lock(step_mutex_);
  if (revision <= revision_) return;
  if (groups.size() != options_.size()) {
    throwInvalidArgument(
        c10::str("there are ", options_.size(), " groups of parameters, but options of ", groups.size()));
  }
  auto merged = groups;
  std::vector<std::unique_ptr<Algorithm>> algorithms;
  for (size_t i = 0; i < groups.size(); ++i) {
    merged[i].insert(options_[i].begin(), options_[i].end());
    algorithms.push_back(makeAlgorithm(kind_, merged[i], Ranges::kUnchecked));
  }
  algorithms_ = std::move(algorithms);
  options_ = std::move(merged);
  revision_ = revision;
}

}  // namespace torchrpc
