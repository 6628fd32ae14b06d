#pragma once

// Distributed autograd on one node: contexts, the recording of calls in them, and backward passes over several workers.
// README.md here explains the algorithm and why it is right; wire/PROTOCOL.md, "Autograd", has the messages.
// Threads: every method from any thread. backward() blocks; handlers run on the pool.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "agent/messenger.h"
#include "autograd/backward_pass.h"
#include "autograd/context.h"
#include "autograd/context_table.h"
#include "autograd/recorder.h"
#include "rref/rref_service.h"

namespace torchrpc {

class AutogradService {
 public:
  struct Options {
    /// An exception of user code (of a node or hook) as an error that can travel; empty: its what().
    std::function<Error(std::exception_ptr raised)> to_error;
    /// What user code needs on the thread that runs it, as long as it lives; empty: nothing.
    std::function<std::shared_ptr<void>()> enter_user_code;
    /// How long a kFast pass waits for gradients while nothing moves; 0: for ever.
    std::function<Duration()> patience;
    /// What contexts are counted from: where workers may be started again, larger than those of the time before.
    int64_t first_context = 1;
  };
  struct DebugInfo {
    size_t contexts = 0;
    size_t backward_passes = 0;  ///< under way on this worker
  };

  /// Registers its handlers with `messenger`, which must outlive it; before the node starts.
  AutogradService(Messenger& messenger, Options options);
  /// close().
  ~AutogradService();
  AutogradService(const AutogradService&) = delete;
  AutogradService& operator=(const AutogradService&) = delete;

  /// What calls and RRef fetches are to be sent and served through, to be recorded.
  Messenger& recorder() { return recorder_; }
  /// Serves backward passes from the values of these RRefs; before the node starts.
  void serve(RRefService& rrefs);

  // --- contexts ---

  /// A context of this worker's own, the current one of the calling thread from now on.
  /// Throws Error(kInvalidArgument) if the thread has one.
  ContextPtr newContext();
  /// Throws Error(kInvalidArgument) if this worker knows none of that id.
  ContextPtr context(ContextId id) const;
  /// Ends a context: graph, gradients and passes here at once. If it is this worker's own, workers that know it learn
  /// of it with the next call that goes to them, or soon. No longer the thread's current one. Throws as context().
  void release(ContextId id);
  ContextId largestId() const { return contexts_.largestId(); }

  /// The gradients that passes have left in a context here: (leaf, gradient), the tensors themselves, not copies.
  /// Throws as context().
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients(ContextId id) const { return context(id)->gradients(); }

  // --- backward ---

  /// Runs a backward pass from `roots` (one element each) over all workers that they depend on, and waits for its end.
  /// Gradients are added up in the context, each on its leaf's worker; .grad is not touched.
  /// Throws Error: kInvalidArgument for roots and contexts that cannot be; kBackward ("Error on Node 2: ...") for what
  /// a node or hook threw, here or elsewhere; kWorkerLost.
  void backward(ContextId id, const std::vector<at::Tensor>& roots, bool retain_graph, BackwardMode mode);
  /// The same from an RRef's value, run by its owner.
  void backward(ContextId id, const RRefPtr& root, bool retain_graph, BackwardMode mode);

  // --- the end ---

  /// A worker is gone for good: its contexts end here, passes that involve it fail. On the loop.
  void onWorkerLost(const WorkerInfo& worker);
  /// Another worker has joined under the id of a lost one.
  void welcome(const WorkerInfo& worker) { contexts_.welcome(worker.id); }
  /// Ends all contexts; there are none after it. Idempotent.
  void close();

  /// Adds the workers whose contexts are kept here, and those that take part in backward passes of ours.
  void addAwaited(std::set<WorkerId>& workers) const;

  DebugInfo debugInfo() const;

 private:
  std::shared_ptr<BackwardPass> makePass(const ContextPtr& context, const PassHeader& header);
  /// The pass that a message is about, made if it is the first; throws Error if context or pass have ended.
  std::shared_ptr<BackwardPass> passOf(const PassHeader& header);
  void serve(Kind kind, void (AutogradService::*handler)(Request, const Responder&));
  void serveMark(Request request, const Responder& responder);
  void serveGradients(Request request, const Responder& responder);
  /// On the loop: for a pass that is at work here.
  bool passGradientsOn(const Request& request, const Responder& responder);
  void serveAbort(Request request, const Responder& responder);
  void serveRelease(Request request, const Responder& responder);
  void serveHeld(Request request, const Responder& responder);
  void backwardFrom(const PassHeader& header, const c10::IValue& value);

  /// Ends contexts that are out of the table; the workers that know them are owed the news.
  void end(const std::vector<ContextPtr>& contexts, const Error& reason);
  /// Sends the news that no call has taken along, after a while.
  void scheduleNews();
  void sendNews();
  /// Tells owners which of their contexts have come here, through whomever.
  void tellOwners();

  Messenger& messenger_;
  const BackwardPass::Environment environment_;
  ContextTable contexts_;
  Recorder recorder_;
  std::atomic<bool> news_scheduled_{false};
};

/// The one element tensors of a backward pass, and what their gradients begin with. Throws Error(kInvalidArgument) with
/// the texts that scripts match on.
void checkRoots(const std::vector<at::Tensor>& roots);

}  // namespace torchrpc
