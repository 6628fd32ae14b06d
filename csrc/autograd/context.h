#pragma once

// One worker's part of a distributed autograd context: the send and receive functions of the messages recorded in it,
// the gradients that passes have left, and the workers that this one has sent it to. Thread-safe.

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd/functions.h"
#include "autograd/ids.h"
#include "base/error.h"
#include "base/result.h"
#include "base/sync/mutex.h"
#include "device/streams.h"

namespace torchrpc {

class BackwardPass;

class AutogradContext {
 public:
  explicit AutogradContext(ContextId id) : id_(id) {}

  ContextId id() const { return id_; }
  /// The worker that created it and ends it.
  WorkerId owner() const { return makerOf(id_); }

  // --- recording; no effect once the context has ended ---

  void addSend(NodeOf<SendFunction> function);
  void addRecv(NodeOf<RecvFunction> function);
  /// False if the context has ended: no message to `worker` may refer to it any more.
  bool addKnownWorker(WorkerId worker);
  /// A message of `worker` in this context has arrived.
  void addSender(WorkerId worker);
  /// `worker` says that it has this context, which another one has sent it: it is told of the end, no more. False if
  /// the context has ended.
  bool addHolder(WorkerId worker);

  /// Null if there is none.
  NodeOf<SendFunction> send(MessageId id) const;
  std::vector<NodeOf<SendFunction>> sends() const;
  std::vector<NodeOf<RecvFunction>> recvs() const;
  std::set<WorkerId> knownWorkers() const;
  /// Whether a message in this context has come from that worker or gone to it, or it is the owner. Others have no part
  /// in its passes.
  bool takesPart(WorkerId worker) const;

  // --- gradients ---

  /// Adds `gradient` to the gradient of `leaf`, as AccumulateGrad does with .grad: if only the caller refers to the
  /// tensor, it is moved and not copied.
  void accumulate(const at::Tensor& leaf, const at::Tensor& gradient);
  /// Removes and returns the gradient of `leaf`; undefined if there is none.
  at::Tensor takeGradient(const at::Tensor& leaf);
  /// Sets the gradient of `leaf`, or adds to one that has been set since takeGradient().
  void putGradient(const at::Tensor& leaf, at::Tensor gradient);
  /// In the order of their first gradients. The current streams wait for the work that computes them.
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const;

  // --- backward passes ---

  /// The pass of that id, created by `make` if there is none. Null if the context has ended. Throws the Error that the
  /// pass has failed with.
  std::shared_ptr<BackwardPass> pass(PassId id, const std::function<std::shared_ptr<BackwardPass>()>& make);
  /// Null if there is none of that id.
  std::shared_ptr<BackwardPass> findPass(PassId id) const;
  /// The pass has ended: removes and returns it; null if there is none. The context keeps a failure, because marks and
  /// gradients of the pass may still arrive.
  std::shared_ptr<BackwardPass> endPass(PassId id, const Status& failure);
  std::vector<std::shared_ptr<BackwardPass>> passes() const;

  /// Ends the context: its passes fail with `reason`; its graph and gradients are destroyed, on this thread, under no
  /// lock. Idempotent. Returns the workers to notify.
  std::set<WorkerId> end(const Error& reason);

 private:
  struct Gradient {
    at::Tensor leaf;
    at::Tensor value;
    StreamEventsPtr computed{};  ///< the device work that computes the value; null: there is none
  };
  /// All that is destroyed when the context ends.
  struct Contents {
    std::map<MessageId, NodeOf<SendFunction>> sends;
    std::map<MessageId, NodeOf<RecvFunction>> recvs;
    std::set<WorkerId> known_workers;
    std::set<WorkerId> participants;                            ///< see takesPart()
    std::unordered_map<const at::TensorImpl*, size_t> indices;  ///< leaf -> index in `gradients`
    std::vector<Gradient> gradients;
    std::map<PassId, std::shared_ptr<BackwardPass>> passes;
    std::map<PassId, Error> failures;  ///< of passes that have ended
  };

  const ContextId id_;
  mutable Mutex mutex_;
  bool ended_ TORCHRPC_GUARDED_BY(mutex_) = false;
  Contents contents_ TORCHRPC_GUARDED_BY(mutex_);
};

using ContextPtr = std::shared_ptr<AutogradContext>;

/// The context that calls made on this thread are recorded in, or null.
const ContextPtr& currentContext();

/// Makes a context (null: none) the thread's current one while the scope lives.
class ContextScope {
 public:
  explicit ContextScope(ContextPtr context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  ContextPtr outer_;
};

/// Sets the current context without a scope: `with context():` enters and exits in two separate calls from Python.
void setCurrentContext(ContextPtr context);

}  // namespace torchrpc
