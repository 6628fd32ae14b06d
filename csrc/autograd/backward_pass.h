#pragma once

// One worker's part of one backward pass. README.md explains the algorithm: which send functions take part (marking),
// how gradients flow, and how the worker that started the pass learns that all of it has ended.
//
// The local graph runs on one thread: the calling thread on the worker that has the roots, a pool thread on the others.
// That thread also waits for gradients that other workers have yet to send.

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "agent/messenger.h"
#include "autograd/context.h"
#include "autograd/gradient_loan.h"
#include "autograd/local_graph.h"
#include "autograd/pass_messages.h"
#include "base/sync/mutex.h"

namespace torchrpc {

class BackwardPass : public std::enable_shared_from_this<BackwardPass> {
 public:
  struct Environment {
    Messenger& messenger;
    /// Converts what user code threw to an error that can be sent.
    std::function<Error(std::exception_ptr raised)> to_error;
    /// Returns what nodes and hooks need on the thread that runs them, for as long as the result lives.
    std::function<std::shared_ptr<void>()> enter_user_code;
    /// How long a kFast pass waits without progress before it fails; 0: no limit.
    std::function<Duration()> progress_timeout;
  };
  using Done = std::function<void(Status)>;
  using SendReply = std::function<void(Result<GradientReply>)>;

  BackwardPass(const Environment& environment, ContextPtr context, PassId id, BackwardMode mode, bool retain_graph);

  /// On the worker with the roots: runs the whole pass; blocks until it has ended on all workers. Throws Error.
  void run(edge_list roots, variable_list gradients);

  /// A request of another worker: adds these send functions to the pass, and all that they depend on, on all workers;
  /// then calls `done`. Throws Error(kProtocol).
  void mark(WorkerId from, const std::vector<MessageId>& sends, Done done);

  /// A request of another worker: gradients for a send function. The first request starts the local part; it returns
  /// when the local graph has run, and is replied to when all work that follows from it has ended. All other requests
  /// are replied to at once. Throws Error(kProtocol).
  void receive(WorkerId from, GradientRequest request, SendReply send_reply);

  /// Whether the local part has started: from then on receive() does not block.
  bool hasStarted();

  /// Ends the pass, here and on the workers that it has reached from here. The first failure counts.
  void fail(Error error);

  /// The pass fails if it has come from that worker or has reached it.
  void onWorkerLost(const WorkerInfo& worker);

 private:
  struct ReceivedGradients {
    NodeOf<SendFunction> send;  ///< null: not recorded
    variable_list gradients;
  };
  using Sends = std::vector<NodeOf<SendFunction>>;
  using RecvFunctions = std::vector<const RecvFunction*>;

  /// Throws Error(kProtocol) if one was not recorded.
  /// The message of that id, if it was sent to that worker; else null.
  NodeOf<SendFunction> sendTo(WorkerId receiver, MessageId id) const;
  /// Throws Error(kProtocol) for messages that were not sent to that worker.
  Sends sendsTo(WorkerId receiver, const std::vector<MessageId>& ids) const;
  /// Adds send functions to the graph. Returns the receive functions that the graph has gained.
  RecvFunctions addSends(const Sends& sends) TORCHRPC_REQUIRES(mutex_);
  /// Asks the senders of these receive functions to mark their send functions; `done` when all have replied.
  void sendMarks(const RecvFunctions& received, Done done);
  /// Marks all that the roots depend on, on all workers; without a message where planWithoutMarking() succeeds.
  void markDependencies(RecvFunctions received);
  /// Finds all marks from the dependencies that replies have declared; false if some are missing.
  bool planWithoutMarking(RecvFunctions& received);

  void runFrom(edge_list roots, variable_list gradients);
  /// Runs the local graph to its end, in a graph task of torch's engine.
  void runLocalPart();
  void runGraph();
  /// Wakes the thread in waitUntil().
  void notifyChanged();
  /// Blocks until `predicate`, which is called with mutex_ held. The thread handles messages meanwhile where the
  /// transport supports it. False: `deadline` has passed. Throws the failure if the pass has failed by then.
  bool waitUntil(const std::function<bool()>& predicate, TimePoint deadline = kNever);
  /// The gradients that have been received since the last call. Waits if no node can run. nullopt: all gradients have
  /// been received and no node is left.
  std::optional<std::vector<ReceivedGradients>> nextGradients();
  Error noProgressError();

  /// Accepts gradients; false if the pass does not wait for them.
  bool accept(ReceivedGradients gradients) TORCHRPC_REQUIRES(mutex_);
  void deliver(const RecvFunction& recv, variable_list gradients);
  void send(WorkerId to, MessageGradients gradients);
  void sendDeferred();
  /// They can be sent from the current streams. nullopt: there are none.
  std::optional<MessageGradients> takeDeferred();
  void onReply(WorkerId from, bool counted, const Result<Message>& reply);
  std::shared_ptr<void> lend(const torch::autograd::AccumulateGrad& leaf);
  /// Ends the pass here, wakes its thread and sends the last reply, once no work is left here or on workers reached.
  void finishIfDone();
  void sendAborts(const std::set<WorkerId>& workers, const Error& reason);
  PassHeader header() const { return {context_->id(), id_, mode_, retain_graph_}; }
  static void throwIfFailed(const Status& failure) {
    if (failure) throw *failure;
  }

  const Environment& environment_;
  const ContextPtr context_;
  const PassId id_;
  const BackwardMode mode_;
  const bool retain_graph_;
  // constant once the local part has started; only on the worker with the roots:
  std::map<WorkerId, std::vector<MessageId>> planned_sends_;  ///< marks of other workers, which travel with gradients
  // guarded by mutex_ until the local part starts; then only its thread uses the graph and destroys it:
  std::optional<LocalGraph> graph_;
  // only the thread that runs the local part:
  std::vector<std::pair<at::Tensor, at::Tensor>> leaf_gradients_;  ///< leaves and their gradients
  std::vector<std::unique_ptr<GradientLoan>> loans_;               ///< that last until the graph has run
  std::unordered_set<const at::TensorImpl*> lent_leaves_;
  std::optional<MessageGradients> deferred_;  ///< for started_by_: sent with the reply if no work follows them
  StreamEventsPtr deferred_computed_;         ///< the device work that computes them
  std::exception_ptr interrupt_exception_;    ///< what a signal handler raised during a wait
  Mutex mutex_;
  CondVar changed_;
  FutexWaiter futex_waiter_;  ///< for the thread that runs the local part
  bool all_marked_ TORCHRPC_GUARDED_BY(mutex_) = false;
  bool started_ TORCHRPC_GUARDED_BY(mutex_) = false;     ///< the local part
  bool graph_done_ TORCHRPC_GUARDED_BY(mutex_) = false;  ///< the local graph has run to its end
  bool ended_ TORCHRPC_GUARDED_BY(mutex_) = false;
  Status failure_ TORCHRPC_GUARDED_BY(mutex_);
  std::set<MessageId> marked_ TORCHRPC_GUARDED_BY(mutex_);              ///< send functions that take part
  std::set<MessageId> awaiting_gradients_ TORCHRPC_GUARDED_BY(mutex_);  ///< those of them without gradients so far
  std::vector<ReceivedGradients> received_ TORCHRPC_GUARDED_BY(mutex_);
  size_t outstanding_ TORCHRPC_GUARDED_BY(mutex_) = 0;  ///< requests with gradients whose reply the pass waits for
  std::set<WorkerId> source_workers_ TORCHRPC_GUARDED_BY(mutex_);   ///< workers that the pass has come from
  std::set<WorkerId> reached_workers_ TORCHRPC_GUARDED_BY(mutex_);  ///< workers that it has reached from here
  SendReply send_reply_ TORCHRPC_GUARDED_BY(mutex_);                ///< to the request that started the local part
  std::optional<WorkerId> started_by_;                              ///< its sender; constant from then on
};

}  // namespace torchrpc
