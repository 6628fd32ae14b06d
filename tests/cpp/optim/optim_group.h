#pragma once

// Workers with RRefs and optimizers in one process. The test sets the gradients itself, without a backward pass.

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include <future>
#include <memory>
#include <vector>

#include "agent/loopback_group.h"
#include "optim/distributed_optimizer.h"
#include "outcomes.h"

namespace torchrpc::test {

class OptimWorker {
 public:
  explicit OptimWorker(Agent& agent)
      : agent_(agent),
        rrefs_(RRefService::create(agent, {.encode_value = [](const auto&, const auto&) { return Message(); }})),
        optim_(agent, *rrefs_, [this](int64_t context) { return gradients(context); }) {
    agent.onLateReply([this](const Message& reply) { rrefs_->discard(reply); });
    agent.onWorkerLost([this](const WorkerInfo& worker) { rrefs_->onWorkerLost(worker); });
  }

  RRefService& rrefs() { return *rrefs_; }
  OptimService& optim() { return optim_; }
  WorkerId id() const { return agent_.self().id; }

  void setGradients(int64_t context, OptimService::GradientList gradients) {
    MutexLock lock(mutex_);
    gradients_[context] = std::move(gradients);
  }

 private:
  OptimService::GradientList gradients(int64_t context) {
    MutexLock lock(mutex_);
    const auto it = gradients_.find(context);
    if (it != gradients_.end()) return it->second;
    throw Error(ErrorCode::kInvalidArgument, "Could not find autograd context with id: " + std::to_string(context));
  }

  Agent& agent_;
  const std::shared_ptr<RRefService> rrefs_;
  OptimService optim_;
  Mutex mutex_;
  std::map<int64_t, OptimService::GradientList> gradients_ TORCHRPC_GUARDED_BY(mutex_);
};

class OptimGroup {
 public:
  explicit OptimGroup(int size) : agents_({.size = size}) {
    for (int id = 0; id < size; ++id) workers_.push_back(std::make_unique<OptimWorker>(agents_[id]));
    agents_.start();
  }
  ~OptimGroup() {
    for (size_t id = 0; id < workers_.size(); ++id) agents_[static_cast<int>(id)].close();
    for (auto& worker : workers_) worker->rrefs().destroy();
  }

  OptimWorker& operator[](int id) { return *workers_.at(id); }
  Agent& agent(int id) { return agents_[id]; }

  /// An RRef on worker 0 to a value that `owner` owns.
  RRefPtr give(int owner, c10::IValue value) {
    const auto rref = workers_[owner]->rrefs().createOwner();
    rref->setValue(std::move(value));
    return give(rref);
  }
  RRefPtr give(const std::shared_ptr<OwnerRRef>& rref) {
    if (rref->owner().id == 0) return rref;
    std::vector<RRefPtr> adopted;
    workers_[0]->rrefs().adopt(
        {workers_[rref->owner().id]->rrefs().fork(rref, 0)}, /*wait_for_owner=*/false,
        [&](Result<std::vector<RRefPtr>> rrefs) { adopted = std::move(rrefs).take(); });
    return adopted.at(0);
  }

  /// Sends any message, from worker 0 unless another is named; returns the reply.
  Result<Message> request(int to, Message message, int from = 0) {
    Pending pending;
    agents_[from].request(to, std::move(message), std::chrono::seconds(20), pending.handler());
    return pending.get();
  }

 private:
  LoopbackGroup agents_;
  std::vector<std::unique_ptr<OptimWorker>> workers_;
};

inline at::Tensor parameter(double value) { return at::full({2}, value).requires_grad_(); }

/// A parameter whose destruction can be waited for.
struct TrackedParameter {
  std::promise<void> destroyed;
  std::vector<float> memory = {1, 1};
  at::Tensor make() {
    return at::from_blob(memory.data(), {2}, [this](void*) { destroyed.set_value(); }).requires_grad_();
  }
  bool waitDestroyed() {
    return destroyed.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  }
};

}  // namespace torchrpc::test
