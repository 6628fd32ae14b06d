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

#include "autograd/context.h"
#include "autograd/gradient_loan.h"
#include "autograd/local_graph.h"
#include "autograd/pass_messages.h"
#include "base/sync/mutex.h"
#include "calls/messenger.h"

namespace torchrpc {

class BackwardPass : public std::enable_shared_from_this<BackwardPass> {
 public:
  struct Environment {
    Messenger& messenger;
    /// Converts an exception of user code to an error that can be sent.
    std::function<Error(std::exception_ptr raised)> to_error;
    /// Sets up the calling thread for nodes and hooks, for as long as the result lives.
    std::function<std::shared_ptr<void>()> enter_user_code;
    /// How long a kFast pass waits without progress before it fails; 0: no limit.
    std::function<Duration()> progress_timeout;
  };
  using Done = std::function<void(Status)>;
  using SendReply = std::function<void(Result<GradientReply>)>;

  BackwardPass(const Environment& environment, ContextPtr context, PassId id, BackwardMode mode, bool retain_graph);

  /// On the worker with the roots: runs the whole pass; blocks until it has ended on all workers. Throws Error.
  void run(edge_list roots, variable_list gradients);

  /// Serves a mark request of another worker: adds these send functions to the pass, and all send functions that they
  /// depend on, on all workers; then calls `done`. Throws Error(kProtocol).
  void mark(WorkerId from, const std::vector<MessageId>& sends, Done done);

  /// Serves gradients of another worker for a send function. The first request starts the local part: this call returns
  /// when the local graph has run, and the reply is sent when all work that follows from the request has ended. All
  /// other requests are replied to at once. Throws Error(kProtocol).
  void receive(WorkerId from, GradientRequest request, SendReply send_reply);

  /// Whether the local part has started: from then on receive() does not block.
  bool hasStarted();

  /// Ends the pass with an error, here and on the workers that it has reached from here. The first failure counts.
  void fail(Error error);

  /// Fails the pass if it has come from that worker, or has reached it from here.
  void onWorkerLost(const WorkerInfo& worker);

 private:
  struct ReceivedGradients {
    NodeOf<SendFunction> send;  ///< null: no such message was recorded
    variable_list gradients;
  };
  using Sends = std::vector<NodeOf<SendFunction>>;
  using RecvFunctions = std::vector<const RecvFunction*>;

  /// Returns the send function of that message, or null if no such message was sent to that worker.
  NodeOf<SendFunction> sendTo(WorkerId receiver, MessageId id) const;
  /// The same for several messages. Throws Error(kProtocol) if one was not sent to that worker.
  Sends sendsTo(WorkerId receiver, const std::vector<MessageId>& ids) const;
  /// Marks send functions and adds them to the graph. Returns the receive functions that are new in the graph.
  RecvFunctions addSends(const Sends& sends) TORCHRPC_REQUIRES(mutex_);
  /// Asks the senders of these messages to mark their send functions; calls `done` when all have replied.
  void sendMarks(const RecvFunctions& received, Done done);
  /// Marks all send functions that the roots depend on, on all workers. Sends nothing if planWithoutMarking() succeeds.
  void markDependencies(RecvFunctions received);
  /// Finds all marks by the dependencies that replies have declared. Returns false if these do not suffice.
  bool planWithoutMarking(RecvFunctions& received);

  void runFrom(edge_list roots, variable_list gradients);
  /// Runs the local graph to its end, in a graph task of torch's engine.
  void runLocalPart();
  void runGraph();
  /// Wakes the thread in waitUntil().
  void notifyChanged();
  /// Blocks until `predicate`, which is called with mutex_ held, is true. Meanwhile the thread handles messages, if the
  /// transport supports it. Returns false if `deadline` has passed. Throws the failure if the pass has failed by then.
  bool waitUntil(const std::function<bool()>& predicate, TimePoint deadline = kNever);
  /// Returns the gradients that have been received since the last call. Waits for gradients if no node can run.
  /// nullopt: all gradients have been received and no node is left.
  std::optional<std::vector<ReceivedGradients>> nextGradients();
  /// Waits until this worker and all others whose answers it awaits have ended their parts.
  void waitForEnd();
  /// The time by which another worker must have answered or sent gradients; kNever in SMART mode.
  TimePoint progressDeadline() const;
  Error noProgressError();

  /// Accepts gradients; returns false if the pass does not wait for them.
  bool accept(ReceivedGradients gradients) TORCHRPC_REQUIRES(mutex_);
  void deliver(const RecvFunction& recv, variable_list gradients);
  void send(WorkerId to, MessageGradients gradients);
  void sendDeferred();
  /// Removes and returns the deferred gradients, if any. The current streams wait for the work that computes them.
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
  // constant once the local part has started; filled on the worker with the roots only:
  std::map<WorkerId, std::vector<MessageId>> planned_sends_;  ///< marks for other workers, sent with the gradients
  // guarded by mutex_ until the local part starts; then only its thread uses the graph and destroys it:
  std::optional<LocalGraph> graph_;
  // only the thread that runs the local part:
  std::vector<std::pair<at::Tensor, at::Tensor>> leaf_gradients_;  ///< leaves and their gradients
  std::vector<std::unique_ptr<GradientLoan>> loans_;               ///< those that last until the graph has run
  std::unordered_set<const at::TensorImpl*> lent_leaves_;
  std::optional<MessageGradients> deferred_;  ///< for started_by_: sent with the last reply if no work follows them
  StreamEventsPtr deferred_computed_;         ///< the device work that computes them
  std::exception_ptr interrupt_exception_;    ///< raised by a signal handler during a wait
  Mutex mutex_;
  CondVar changed_;
  FutexWaiter futex_waiter_;  ///< for the thread that runs the local part
  bool all_marked_ TORCHRPC_GUARDED_BY(mutex_) = false;
  bool started_ TORCHRPC_GUARDED_BY(mutex_) = false;     ///< the local part
  bool graph_done_ TORCHRPC_GUARDED_BY(mutex_) = false;  ///< the local graph has run to its end
  bool ended_ TORCHRPC_GUARDED_BY(mutex_) = false;
  Status failure_ TORCHRPC_GUARDED_BY(mutex_);
  std::set<MessageId> marked_ TORCHRPC_GUARDED_BY(mutex_);              ///< send functions that take part
  std::set<MessageId> awaiting_gradients_ TORCHRPC_GUARDED_BY(mutex_);  ///< marked ones without gradients so far
  std::vector<ReceivedGradients> received_ TORCHRPC_GUARDED_BY(mutex_);
  size_t outstanding_ TORCHRPC_GUARDED_BY(mutex_) = 0;  ///< requests with gradients whose reply the pass waits for
  std::set<WorkerId> source_workers_ TORCHRPC_GUARDED_BY(mutex_);   ///< workers that the pass has come from
  std::set<WorkerId> reached_workers_ TORCHRPC_GUARDED_BY(mutex_);  ///< workers that the pass has reached from here
  SendReply send_reply_ TORCHRPC_GUARDED_BY(mutex_);                ///< to the request that started the local part
  std::optional<WorkerId> started_by_;                              ///< the sender of that request; constant once set
};

}  // namespace torchrpc
