#include "autograd/context.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "autograd/backward_pass.h"

namespace torchrpc {

void AutogradContext::addSend(NodeOf<SendFunction> function) {
  MutexLock lock(mutex_);
  if (!ended_) contents_.sends.emplace(function->id(), std::move(function));
}

void AutogradContext::addRecv(NodeOf<RecvFunction> function) {
  MutexLock lock(mutex_);
  if (!ended_) contents_.recvs.emplace(function->id(), std::move(function));
}

bool AutogradContext::addKnownWorker(WorkerId worker) {
  MutexLock lock(mutex_);
  if (ended_) return false;
  contents_.known_workers.insert(worker);
  contents_.participants.insert(worker);
  return true;
}

void AutogradContext::addSender(WorkerId worker) {
  MutexLock lock(mutex_);
  if (!ended_) contents_.participants.insert(worker);
}

bool AutogradContext::addHolder(WorkerId worker) {
  MutexLock lock(mutex_);
  if (!ended_) contents_.known_workers.insert(worker);
  return !ended_;
}

bool AutogradContext::takesPart(WorkerId worker) const {
  MutexLock lock(mutex_);
  return worker == owner() || contents_.participants.contains(worker);
}

NodeOf<SendFunction> AutogradContext::send(MessageId id) const {
  MutexLock lock(mutex_);
  const auto found = contents_.sends.find(id);
  return found == contents_.sends.end() ? nullptr : found->second;
}

namespace {

template <typename Map>
auto valuesOf(const Map& map) {
  std::vector<typename Map::mapped_type> out;
  out.reserve(map.size());
  for (const auto& [key, value] : map) out.push_back(value);
  return out;
}

}  // namespace

std::vector<NodeOf<SendFunction>> AutogradContext::sends() const {
  MutexLock lock(mutex_);
  return valuesOf(contents_.sends);
}

std::vector<NodeOf<RecvFunction>> AutogradContext::recvs() const {
  MutexLock lock(mutex_);
  return valuesOf(contents_.recvs);
}

std::set<WorkerId> AutogradContext::knownWorkers() const {
  MutexLock lock(mutex_);
  return contents_.known_workers;
}

void AutogradContext::accumulate(const at::Tensor& leaf, const at::Tensor& gradient) {
  // The sum is computed outside the lock. putGradient() adds a gradient that another pass has set in the meantime.
  at::Tensor sum = takeGradient(leaf);
  torch::autograd::AccumulateGrad::accumulateGrad(
      leaf, sum, gradient, /*num_expected_refs=*/1, [&](at::Tensor&& updated) { sum = std::move(updated); });
  putGradient(leaf, std::move(sum));
}

at::Tensor AutogradContext::takeGradient(const at::Tensor& leaf) {
  at::Tensor value;
  StreamEventsPtr computed;
  {
    MutexLock lock(mutex_);
    const auto found = contents_.indices.find(leaf.unsafeGetTensorImpl());
    if (found == contents_.indices.end()) return {};
    auto& gradient = contents_.gradients[found->second];
    value = std::move(gradient.value);
    computed = std::move(gradient.computed);
  }
  UsedDevices::waitFor(computed);
  return value;
}

void AutogradContext::putGradient(const at::Tensor& leaf, at::Tensor gradient) {
  while (true) {
    at::Tensor other;
    auto computed = gradient.defined() && isAccelerator(gradient.device()) ? UsedDevices::record() : nullptr;
    {
      MutexLock lock(mutex_);
      if (ended_ || !gradient.defined()) return;
      const auto [found, is_new] =
          contents_.indices.try_emplace(leaf.unsafeGetTensorImpl(), contents_.gradients.size());
      if (is_new) contents_.gradients.push_back({leaf, {}});
      auto& set = contents_.gradients[found->second];
      if (!set.value.defined()) {
        set.value = std::move(gradient);
        set.computed = std::move(computed);
        return;
      }
      other = std::move(set.value);
      computed = std::move(set.computed);
    }
    UsedDevices::waitFor(computed);
    gradient = other + gradient;
  }
}

std::vector<std::pair<at::Tensor, at::Tensor>> AutogradContext::gradients() const {
  std::vector<std::pair<at::Tensor, at::Tensor>> out;
  std::vector<StreamEventsPtr> computed;
  {
    MutexLock lock(mutex_);
    out.reserve(contents_.gradients.size());
    for (const auto& gradient : contents_.gradients) {
      if (!gradient.value.defined()) continue;
      out.emplace_back(gradient.leaf, gradient.value);
      if (gradient.computed) computed.push_back(gradient.computed);
    }
  }
  for (const auto& events : computed) UsedDevices::waitFor(events);
  return out;
}

std::shared_ptr<BackwardPass> AutogradContext::pass(
    PassId id, const std::function<std::shared_ptr<BackwardPass>()>& make) {
  if (auto found = findPass(id)) return found;
  auto created = make();
  MutexLock lock(mutex_);
  if (ended_) return nullptr;
  if (const auto failed = contents_.failures.find(id); failed != contents_.failures.end()) throw failed->second;
  return contents_.passes.emplace(id, std::move(created)).first->second;
}

std::shared_ptr<BackwardPass> AutogradContext::findPass(PassId id) const {
  MutexLock lock(mutex_);
  const auto found = contents_.passes.find(id);
  return found == contents_.passes.end() ? nullptr : found->second;
}

std::shared_ptr<BackwardPass> AutogradContext::endPass(PassId id, const Status& failure) {
  MutexLock lock(mutex_);
  if (failure && !ended_) contents_.failures.try_emplace(id, *failure);
  auto removed = contents_.passes.extract(id);
  return removed ? std::move(removed.mapped()) : nullptr;
}

std::vector<std::shared_ptr<BackwardPass>> AutogradContext::passes() const {
  MutexLock lock(mutex_);
  return valuesOf(contents_.passes);
}

std::set<WorkerId> AutogradContext::end(const Error& reason) {
  Contents contents;
  {
    MutexLock lock(mutex_);
    ended_ = true;
    contents = std::exchange(contents_, {});
  }
  for (const auto& [id, pass] : contents.passes) pass->fail(reason);
  return std::move(contents.known_workers);
}

namespace {

ContextPtr& current() {
  thread_local ContextPtr context;
  return context;
}

}  // namespace

const ContextPtr& currentContext() { return current(); }

void setCurrentContext(ContextPtr context) { current() = std::move(context); }

ContextScope::ContextScope(ContextPtr context) : outer_(std::exchange(current(), std::move(context))) {}

ContextScope::~ContextScope() { current() = std::move(outer_); }

}  // namespace torchrpc
