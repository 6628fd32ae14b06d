#pragma once

// Optimizers on the workers that own the parameters: the owner's side, which hosts and steps them, and what the client
// (DistributedOptimizer) asks its owners through. An optimizer is the value of an RRef, so it lives as long as its
// client's reference, and goes with a client that is lost.
// Threads: every method from any thread. Handlers run on the pool, without Python unless a parameter is an object of
// Python's, which is asked once for its tensor.

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "agent/messenger.h"
#include "optim/optim_messages.h"
#include "optim/optimizer.h"
#include "rref/rref_service.h"

namespace torchrpc {

class OptimService {
 public:
  using GradientList = std::vector<std::pair<at::Tensor, at::Tensor>>;  // leaf, gradient
  /// The gradients in a distributed autograd context on this node. Throws Error(kInvalidArgument) if this node knows no
  /// such context.
  using Gradients = std::function<GradientList(int64_t context)>;

  /// Before the node starts. `messenger` and `rrefs` must outlive it, and it the calls.
  OptimService(Messenger& messenger, RRefService& rrefs, Gradients gradients);
  OptimService(const OptimService&) = delete;
  OptimService& operator=(const OptimService&) = delete;

  /// Makes an optimizer on `owner`, of parameters that it owns; gives the RRef to it.
  using Created = std::function<void(Result<RRefPtr>)>;
  void create(
      const WorkerInfo& owner, const OptimCreate& what, const std::vector<RRefPtr>& params, Duration timeout,
      Created done);

  /// What a request about an optimizer calls it.
  static std::string nameOf(const RRef& optimizer);
  /// Throws Error(kInvalidArgument) if this node knows no such context.
  void checkContext(int64_t context) const { gradients_(context); }

  /// Sends one of the requests about an optimizer to its owner, which keeps it meanwhile. `done` once, on any thread.
  void request(const RRefPtr& optimizer, Message message, Duration timeout, Messenger::ReplyHandler done);

 private:
  void serveCreate(const Request& request, const Responder& responder);
  void serveRequest(const Request& request, const Responder& responder);
  /// Makes the optimizer out of the values of its parameters, and answers with a fork of it.
  void host(
      const WorkerInfo& creator, const OptimCreate& what, const std::vector<c10::IValue>& params,
      const Responder& responder);
  Message perform(Optimizer& optimizer, const Message& message);
  std::optional<GradientList> gradientsIn(int64_t context) const;
  void step(Optimizer& optimizer, const OptimStep& request);

  // constant:
  Messenger& messenger_;
  RRefService& rrefs_;
  const Gradients gradients_;
  /// Of all optimizers here that are not lock-free: two trainers may have given the same parameters.
  const std::shared_ptr<Mutex> loop_mutex_ = std::make_shared<Mutex>();
};

}  // namespace torchrpc
