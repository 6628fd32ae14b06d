#pragma once

// Distributed autograd on one node: contexts, the recording of calls in them, and backward passes over several workers.
// README.md in this folder explains the algorithm and why it is right; wire/PROTOCOL.md, "Autograd", has the messages.
// Threads: every method from any thread. backward() blocks; handlers run on the pool.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "autograd/backward_pass.h"
#include "autograd/context.h"
#include "autograd/context_table.h"
#include "autograd/recorder.h"
#include "base/sync/mutex.h"
#include "calls/messenger.h"
#include "rref/rref_service.h"

namespace torchrpc {

class AutogradService {
 public:
  struct Options {
    /// Converts an exception of user code (of a node or hook) to an error that can be sent. Empty: uses its what().
    std::function<Error(std::exception_ptr raised)> to_error;
    /// Sets up the calling thread for user code, for as long as the result lives. Empty: no setup.
    std::function<std::shared_ptr<void>()> enter_user_code;
    /// How long a kFast pass waits for gradients without progress before it fails; 0: no limit.
    std::function<Duration()> progress_timeout;
    /// The first counter value of this worker's ids. Where workers may be restarted, it must be larger than all values
    /// of the earlier start.
    int64_t first_context = 1;
  };
  struct DebugInfo {
    size_t contexts = 0;
    size_t backward_passes = 0;  ///< running on this worker
  };

  /// Registers its handlers with `messenger`, which must outlive it. Must be created before the node starts.
  AutogradService(Messenger& messenger, const Options& options);
  /// Calls close().
  ~AutogradService();
  AutogradService(const AutogradService&) = delete;
  AutogradService& operator=(const AutogradService&) = delete;

  /// The messenger that calls and RRef fetches must go through, on both sides, to be recorded.
  Messenger& recorder() { return recorder_; }
  /// Registers the handler of backward passes from the values of these RRefs. Before the node starts.
  void serve(RRefService& rrefs);

  // --- contexts ---

  /// Creates a context that this worker owns and makes it the current one of the calling thread.
  /// Throws Error(kInvalidArgument) if the thread has one already.
  ContextPtr newContext();
  /// Throws Error(kInvalidArgument) if this worker has no context of that id.
  ContextPtr context(ContextId id) const;
  /// Ends a context: its graph, gradients and passes on this worker end at once, and it is no longer the thread's
  /// current one. If this worker owns it, the workers that know it are notified with the next call that goes to them,
  /// or by a message of its own after a short delay. Throws as context().
  void release(ContextId id);
  ContextId largestId() const { return contexts_.largestId(); }

  /// The gradients that passes have left in a context on this worker, as pairs (leaf, gradient). These are the tensors
  /// themselves, not copies. Throws as context().
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients(ContextId id) const { return context(id)->gradients(); }

  // --- backward ---

  /// Runs a backward pass from `roots` (one element each) over all workers that they depend on, and waits for its end.
  /// Gradients are added up in the context, each on its leaf's worker; .grad is not touched.
  /// Throws Error: kInvalidArgument for invalid roots and unknown contexts; kBackward ("Error on Node 2: ...") for an
  /// exception of a node or hook on any worker; kWorkerLost.
  void backward(ContextId id, const std::vector<at::Tensor>& roots, bool retain_graph, BackwardMode mode);
  /// The same with the value of an RRef as the root. The owner of the RRef runs the pass.
  void backward(ContextId id, const RRefPtr& root, bool retain_graph, BackwardMode mode);

  // --- the end ---

  /// A worker is lost: its contexts end here, and passes that involve it fail. Called on the loop.
  void onWorkerLost(const WorkerInfo& worker);
  /// A worker has joined. Its earlier starts are lost; the counters of their contexts are below `first_context`.
  void onWorkerJoined(const WorkerInfo& worker, int64_t first_context);
  /// Ends all contexts; from then on none can be created. Idempotent.
  void close();

  /// Adds the workers whose contexts are kept here, and those that take part in backward passes that run here.
  void addOutstanding(std::set<WorkerId>& workers) const;

  DebugInfo debugInfo() const;

 private:
  std::shared_ptr<BackwardPass> makePass(const ContextPtr& context, const PassHeader& header);
  /// Returns the pass that a message of `from` names; creates it if the message is the first one of the pass here.
  /// Throws Error if the context has ended or the pass has failed. If `from` takes no part in the context, the error is
  /// that of an unknown context.
  std::shared_ptr<BackwardPass> passOf(const PassHeader& header, WorkerId from);
  void serve(Kind kind, void (AutogradService::*handler)(Request, const Responder&));
  void serveMark(Request request, const Responder& responder);
  void serveGradients(Request request, const Responder& responder);
  /// Handles gradients, on the loop, for a pass that has started here. Returns false if they need a pool thread.
  bool receiveIfStarted(const Request& request, const Responder& responder);
  void serveAbort(Request request, const Responder& responder);
  void serveRelease(Request request, const Responder& responder);
  void serveHeld(Request request, const Responder& responder);
  void backwardFrom(const PassHeader& header, const c10::IValue& value);

  /// Ends the contexts of a lost worker, which have been removed from the table, and the passes that involve it.
  void endAllOf(const WorkerInfo& worker, std::vector<ContextPtr> contexts);
  /// Ends contexts that have been removed from the table, and schedules snapshots for the workers that know them.
  void end(const std::vector<ContextPtr>& contexts, const Error& reason);
  /// Sends, after a delay, the scheduled snapshots that no call has carried by then.
  void sendSnapshotsLater();
  void sendSnapshots();
  /// Returns, by owner, a message that names all contexts of this owner that this worker has.
  std::map<WorkerId, Message> heldMessages() const;
  /// Tells the owners which of their contexts this worker has.
  void notifyOwners();
  /// Asks an owner that was lost whether it is alive; if not, its contexts end: see Note [Lost owners].
  void confirm(WorkerId owner);
  /// The same after a delay, for an owner whose contexts have ended according to another worker.
  void confirmLater(WorkerId owner);

  Messenger& messenger_;
  const BackwardPass::Environment environment_;
  ContextTable contexts_;
  Recorder recorder_;
  std::atomic<bool> sending_scheduled_{false};
  Mutex mutex_;
  std::set<WorkerId> unconfirmed_ TORCHRPC_GUARDED_BY(mutex_);  ///< owners that are being asked: see confirm()
  std::set<WorkerId> hearsay_ TORCHRPC_GUARDED_BY(mutex_);      ///< owners that will be asked: see confirmLater()
};

/// Checks the one-element tensors that a backward pass starts from. Throws Error(kInvalidArgument) with the texts that
/// scripts match on.
void checkRoots(const std::vector<at::Tensor>& roots);

}  // namespace torchrpc
