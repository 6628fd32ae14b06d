#pragma once

// Optimizers on the workers that own the parameters. The owner's side creates and steps them; the client's side sends
// the requests of DistributedOptimizer. An optimizer is the value of an RRef, so it lives as long as its client's
// reference, and is destroyed when the client is lost.
// Threads: every method from any thread. Handlers run on the pool. They need Python only for a parameter that is a
// Python object, which is converted to its tensor once.

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "calls/messenger.h"
#include "optim/optim_messages.h"
#include "optim/optimizer.h"
#include "rref/rref_service.h"

namespace torchrpc {

class OptimService {
 public:
  using GradientList = std::vector<std::pair<at::Tensor, at::Tensor>>;  // leaf, gradient
  /// Returns the gradients in a distributed autograd context on this node. Throws Error(kInvalidArgument) if this node
  /// has no context of that id.
  using Gradients = std::function<GradientList(int64_t context)>;

  /// Must be created before the node starts. `messenger` and `rrefs` must outlive it; it must outlive all requests.
  OptimService(Messenger& messenger, RRefService& rrefs, Gradients gradients);
  OptimService(const OptimService&) = delete;
  OptimService& operator=(const OptimService&) = delete;

  /// Creates an optimizer on `owner` for parameters that `owner` owns. `done` receives the RRef to the optimizer.
  using Created = std::function<void(Result<RRefPtr>)>;
  void create(
      const WorkerInfo& owner, const OptimCreate& request, const std::vector<RRefPtr>& params, Duration timeout,
      Created done);

  /// The name of an optimizer in requests about it.
  static std::string nameOf(const RRef& optimizer);
  /// Throws Error(kInvalidArgument) if this node has no context of that id.
  void checkContext(int64_t context) const { gradients_(context); }

  /// Sends a request about an optimizer to its owner and keeps the RRef alive until the reply. `done` is called once,
  /// on any thread.
  void request(const RRefPtr& optimizer, Message&& message, Duration timeout, Messenger::ReplyHandler&& done);

 private:
  void serveCreate(const Request& request, const Responder& responder);
  void serveRequest(const Request& request, const Responder& responder);
  /// Creates the optimizer from the values of its parameters, and replies with a fork of its RRef.
  void createHere(
      const WorkerInfo& creator, const OptimCreate& request, const std::vector<c10::IValue>& params,
      const Responder& responder);
  Message execute(Optimizer& optimizer, const Message& request);
  /// Returns the gradients in the context; empty if this node has no context of that id.
  GradientList gradientsIn(int64_t context) const;
  void step(Optimizer& optimizer, const OptimStep& request);

  Messenger& messenger_;
  RRefService& rrefs_;
  const Gradients gradients_;
  /// Shared by all optimizers on this node that are not lock-free, because several trainers may step the same
  /// parameters.
  const std::shared_ptr<Mutex> step_mutex_ = std::make_shared<Mutex>();
};

}  // namespace torchrpc
