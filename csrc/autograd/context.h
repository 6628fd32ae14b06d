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
  /// Adds a worker to which messages of this context go. Returns false if the context has ended: then no message to
  /// `worker` may refer to it.
  bool addKnownWorker(WorkerId worker);
  /// Records that a message of `worker` in this context has arrived.
  void addSender(WorkerId worker);
  /// Adds a worker that has reported that it has this context; a third worker has sent it there. `worker` is notified
  /// of the end, but does not take part. Returns false if the context has ended.
  bool addHolder(WorkerId worker);

  /// Returns the send function of that message, or null.
  NodeOf<SendFunction> send(MessageId id) const;
  std::vector<NodeOf<SendFunction>> sends() const;
  std::vector<NodeOf<RecvFunction>> recvs() const;
  std::set<WorkerId> knownWorkers() const;
  /// Whether a message in this context has come from that worker or gone to it, or the worker is the owner. Other
  /// workers have no part in the passes.
  bool takesPart(WorkerId worker) const;

  // --- gradients ---

  /// Adds `gradient` to the gradient of `leaf`, as AccumulateGrad does with .grad: if only the caller refers to the
  /// tensor, it is moved and not copied.
  void accumulate(const at::Tensor& leaf, const at::Tensor& gradient);
  /// Removes and returns the gradient of `leaf`; undefined if there is none.
  at::Tensor takeGradient(const at::Tensor& leaf);
  /// Sets the gradient of `leaf`, or adds to one that has been set since takeGradient().
  void putGradient(const at::Tensor& leaf, at::Tensor gradient);
  /// Pairs (leaf, gradient), in the order in which the leaves got their first gradients. The current streams wait for
  /// the work that computes the gradients.
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const;

  // --- backward passes ---

  /// Returns the pass of that id, created by `make` if there is none; null if the context has ended. Throws the Error
  /// of a pass that has failed.
  std::shared_ptr<BackwardPass> pass(PassId id, const std::function<std::shared_ptr<BackwardPass>()>& make);
  /// Returns the pass of that id, or null.
  std::shared_ptr<BackwardPass> findPass(PassId id) const;
  /// Removes and returns a pass that has ended; null if there is none. The context keeps its failure, because marks and
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
    StreamEventsPtr computed{};  ///< the device work that computes the value; may be null
  };
  /// The members that are destroyed when the context ends.
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
