#pragma once

// Workers with distributed autograd in one process, over the loopback transport, and helpers for the tests.

#include <catch2/catch.hpp>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "agent/loopback_group.h"
#include "autograd/autograd_worker.h"
#include "outcomes.h"

namespace torchrpc::test {

class AutogradGroup {
 public:
  explicit AutogradGroup(int size, AutogradWorker::Functions functions = {}, LoopbackGroup::Options options = {})
      : functions_(std::move(functions)), agents_(withSize(std::move(options), size)) {
    for (int id = 0; id < size; ++id) {
      workers_.push_back(std::make_unique<AutogradWorker>(
          agents_[id], functions_, [this] { return Duration(progress_timeout_.load()); }));
      agents_[id].onWorkerLost([worker = workers_.back().get()](const WorkerInfo& lost) {
        worker->rrefs().onWorkerLost(lost);
        worker->autograd().onWorkerLost(lost);
      });
      agents_[id].onLateReply(
          [worker = workers_.back().get()](const Message& reply) { worker->rrefs().discard(reply); });
    }
    agents_.start();
  }
  ~AutogradGroup() {
    for (auto& worker : workers_) worker->autograd().close();
    for (auto& worker : workers_) agents_[worker->id()].close();
    for (auto& worker : workers_) worker->rrefs().destroy();
  }

  AutogradWorker& operator[](int id) { return *workers_.at(static_cast<size_t>(id)); }
  Agent& agent(int id) { return agents_[id]; }
  int size() const { return static_cast<int>(workers_.size()); }
  void setProgressTimeout(Duration timeout) { progress_timeout_ = timeout.count(); }

  /// The numbers of contexts and of running passes, on all workers.
  size_t contexts() { return total(&AutogradService::DebugInfo::contexts); }
  size_t passes() { return total(&AutogradService::DebugInfo::backward_passes); }

  /// An RRef on `to` to a value that `owner` owns.
  RRefPtr give(int owner, const at::Tensor& value, int to) {
    const auto rref = (*this)[owner].rrefs().createOwner();
    rref->setValue(value);
    return share(owner, rref, to);
  }
  /// The same for an owner RRef whose value may not be set yet.
  RRefPtr share(int owner, const std::shared_ptr<OwnerRRef>& rref, int to) {
    if (owner == to) return rref;
    std::promise<RRefPtr> adopted;
    (*this)[to].rrefs().adopt(
        {(*this)[owner].rrefs().fork(rref, to)}, /*wait_for_owner=*/false,
        [&](Result<std::vector<RRefPtr>> rrefs) { adopted.set_value(std::move(rrefs).take().at(0)); });
    return adopted.get_future().get();
  }

 private:
  static LoopbackGroup::Options withSize(LoopbackGroup::Options options, int size) {
    options.size = size;
    return options;
  }
  size_t total(size_t AutogradService::DebugInfo::* count) {
    size_t sum = 0;
    for (auto& worker : workers_) sum += worker->autograd().debugInfo().*count;
    return sum;
  }

  const AutogradWorker::Functions functions_;
  std::atomic<Duration::rep> progress_timeout_{kNoLimit.count()};
  LoopbackGroup agents_;
  std::vector<std::unique_ptr<AutogradWorker>> workers_;
};

/// A context that `worker` owns, current on this thread while the object lives.
class OwnContext {
 public:
  explicit OwnContext(AutogradWorker& worker) : worker_(worker), id_(worker.autograd().newContext()->id()) {}
  ~OwnContext() { release(); }
  ContextId id() const { return id_; }
  void release() {
    if (!std::exchange(released_, true)) worker_.autograd().release(id_);
  }

 private:
  AutogradWorker& worker_;
  const ContextId id_;
  bool released_ = false;
};

/// The gradient of a leaf in a context; undefined if none.
inline at::Tensor gradientOf(AutogradWorker& worker, ContextId context, const at::Tensor& leaf) {
  for (const auto& [tensor, gradient] : worker.autograd().gradients(context)) {
    if (tensor.is_same(leaf)) return gradient;
  }
  return {};
}

inline bool holds(const at::Tensor& tensor, double value) {
  return tensor.defined() && tensor.detach().allclose(at::full_like(tensor, value));
}

inline at::Tensor leaf(double value) { return at::full({2}, value).requires_grad_(); }

}  // namespace torchrpc::test
