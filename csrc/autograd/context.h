#pragma once

// One worker's part of a distributed autograd context: the send and receive functions of the messages recorded in it,
// the gradients that passes have left, and the workers it has gone to. Thread-safe.

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

namespace torchrpc {

class BackwardPass;

class AutogradContext {
 public:
  explicit AutogradContext(ContextId id) : id_(id) {}

  ContextId id() const { return id_; }
  /// The worker that made it and ends it.
  WorkerId owner() const { return makerOf(id_); }

  // --- recording; without effect once the context has ended ---

  void addSend(c10::intrusive_ptr<SendFunction> function);
  void addRecv(c10::intrusive_ptr<RecvFunction> function);
  /// False if the context has ended: nothing of it may be told to `worker` any more.
  bool addKnownWorker(WorkerId worker);

  /// Null if there is none.
  c10::intrusive_ptr<SendFunction> send(MessageId id) const;
  std::vector<c10::intrusive_ptr<SendFunction>> sends() const;
  std::vector<c10::intrusive_ptr<RecvFunction>> recvs() const;
  std::set<WorkerId> knownWorkers() const;

  // --- gradients ---

  /// Adds `gradient` to what there is for `leaf`, as AccumulateGrad does with .grad: one that nobody but the caller
  /// refers to is taken and not copied.
  void accumulate(const at::Tensor& leaf, const at::Tensor& gradient);
  /// Takes the gradient of `leaf` out (undefined if there is none), and puts one in.
  at::Tensor takeGradient(const at::Tensor& leaf);
  void putGradient(const at::Tensor& leaf, at::Tensor gradient);
  /// In the order of their first gradients.
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const;

  // --- backward passes ---

  /// The pass of that id, made by `make` if there is none. Null if the context has ended; throws the Error that the
  /// pass has failed with.
  std::shared_ptr<BackwardPass> pass(PassId id, const std::function<std::shared_ptr<BackwardPass>()>& make);
  /// Null if there is none of that id.
  std::shared_ptr<BackwardPass> findPass(PassId id) const;
  /// The pass has ended: takes it out, gives it if it was there. A failure is remembered, for marks and gradients of
  /// the pass may still be on their way.
  std::shared_ptr<BackwardPass> endPass(PassId id, const Status& failure);
  std::vector<std::shared_ptr<BackwardPass>> passes() const;

  /// Ends it: its passes fail with `reason`, graph and gradients are let go, on this thread, under no lock. Idempotent.
  /// Gives the workers to tell.
  std::set<WorkerId> end(const Error& reason);

 private:
  struct Gradient {
    at::Tensor leaf;
    at::Tensor value;
  };
  /// What ends with the context.
  struct Contents {
    std::map<MessageId, c10::intrusive_ptr<SendFunction>> sends;
    std::map<MessageId, c10::intrusive_ptr<RecvFunction>> recvs;
    std::set<WorkerId> known_workers;
    std::unordered_map<const at::TensorImpl*, size_t> places;  ///< of a leaf's gradient in `gradients`
    std::vector<Gradient> gradients;
    std::map<PassId, std::shared_ptr<BackwardPass>> passes;
    std::map<PassId, Error> failures;  ///< of passes
  };

  const ContextId id_;
  mutable Mutex mutex_;
  // guarded by mutex_:
  bool ended_ = false;
  Contents contents_;
};

using ContextPtr = std::shared_ptr<AutogradContext>;

/// The context that calls made on this thread are recorded in, or null.
const ContextPtr& currentContext();

/// Makes a context (or none: null) the thread's current one for a while.
class ContextScope {
 public:
  explicit ContextScope(ContextPtr context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  ContextPtr outer_;
};

/// The same without an end of its own: `with context():` begins and ends in two calls from Python.
void setCurrentContext(ContextPtr context);

}  // namespace torchrpc
