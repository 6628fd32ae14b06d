#pragma once

// One worker's part of one backward pass. README.md explains the algorithm: which send functions take part (marking),
// how gradients flow, and how the worker that began it learns that all of it has ended.
//
// The local graph runs on one thread: the caller's on the worker that has the roots, a thread of the pool on others,
// which waits there for gradients that are still to come.

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
#include "autograd/grad_loan.h"
#include "autograd/local_graph.h"
#include "autograd/pass_messages.h"
#include "base/sync/mutex.h"

namespace torchrpc {

class BackwardPass : public std::enable_shared_from_this<BackwardPass> {
 public:
  struct Environment {
    Messenger& messenger;
    /// What user code threw, as an error that can travel.
    std::function<Error(std::exception_ptr raised)> to_error;
    /// What nodes and hooks need on the thread that runs them, as long as it lives.
    std::function<std::shared_ptr<void>()> enter_user_code;
    /// How long a kFast pass waits while nothing moves; 0: for ever.
    std::function<Duration()> patience;
  };
  using Done = std::function<void(Status)>;
  using Answer = std::function<void(Result<GradientReply>)>;

  BackwardPass(const Environment& environment, ContextPtr context, PassId id, BackwardMode mode, bool retain_graph);

  /// The worker with the roots: runs the whole pass; blocks until it has ended everywhere. Throws Error.
  void run(edge_list roots, variable_list gradients);

  /// From another worker: takes these send functions, and what they depend on, here and elsewhere, into the pass; then
  /// calls `done`. Throws Error(kProtocol).
  void mark(WorkerId from, const std::vector<MessageId>& sends, Done done);

  /// From another worker: gradients for a send function. `answer` is called at once, but for the first that begin the
  /// work here: then when all that follows from it has ended. Such a call returns when the local graph has run. Throws
  /// Error(kProtocol).
  void receive(WorkerId from, GradientRequest request, Answer answer);

  /// The work here has begun: from now on receive() is brief.
  bool isAtWork();

  /// Ends it, here and on the workers it has reached from here. The first failure counts.
  void fail(Error error);

  /// The pass fails if it has come from or gone to that worker.
  void onWorkerLost(const WorkerInfo& worker);

 private:
  struct Arrival {
    c10::intrusive_ptr<SendFunction> send;  ///< null: not recorded
    variable_list gradients;
  };
  using Sends = std::vector<c10::intrusive_ptr<SendFunction>>;
  using Received = std::vector<const RecvFunction*>;

  /// Throws Error(kProtocol) if one was not recorded.
  Sends sendsOf(const std::vector<MessageId>& ids) const;
  /// Takes send functions into the graph; gives the receive functions that are new with them.
  Received addSends(const Sends& sends) TORCHRPC_REQUIRES(mutex_);
  void markOthers(const Received& received, Done done);
  /// Marks all that the roots depend on, everywhere: without a message if what came with the tensors tells it all.
  void markFrom(Received received);
  bool plan(Received& received);

  void runFrom(edge_list roots, variable_list gradients);
  /// Runs the local graph to its end, in a graph task of torch's.
  void work();
  void runGraph();
  /// To who waits in waitUntil().
  void tellChanged();
  /// Blocks until `over`, which is called under mutex_, carrying messages where that helps. False: not by `deadline`.
  /// Throws the failure, if there is one by then.
  bool waitUntil(const std::function<bool()>& over, TimePoint deadline = kNever);
  /// What has come since the last call; waits if there is nothing else to do. nullopt: that was all.
  std::optional<std::vector<Arrival>> nextArrivals();
  Error impatience();

  /// Takes gradients in, unless the pass does not wait for them.
  bool accept(Arrival arrival) TORCHRPC_REQUIRES(mutex_);
  void deliver(const RecvFunction& recv, variable_list gradients);
  void send(WorkerId to, MessageGradients gradients);
  void sendHeld();
  void onAnswer(bool awaited, const Result<Message>& reply);
  std::shared_ptr<void> lend(const torch::autograd::AccumulateGrad& leaf);
  /// Once nothing is left to do, here or further on, tells whoever waits.
  void finishIfDone();
  void tellAbort(const std::set<WorkerId>& workers, const Error& reason);
  PassHeader header() const { return {context_->id(), id_, mode_, retain_graph_}; }
  static void throwIfFailed(const Status& failure) {
    if (failure) throw *failure;
  }

  const Environment& environment_;
  const ContextPtr context_;
  const PassId id_;
  const BackwardMode mode_;
  const bool retain_graph_;
  // constant once the work begins, with the roots only:
  std::map<WorkerId, std::vector<MessageId>> plan_;  ///< send functions of others that take part, for them to be told
  // under mutex_ before the work begins, then the working thread only, which lets it go:
  std::optional<LocalGraph> graph_;
  // the working thread only:
  std::vector<std::pair<at::Tensor, at::Tensor>> captured_;  ///< leaves and their gradients
  std::vector<std::unique_ptr<GradLoan>> loans_;             ///< to the pass' end
  std::unordered_set<const at::TensorImpl*> lent_;
  std::optional<MessageGradients> held_;  ///< for who began the work here: goes with the answer if nothing follows
  std::exception_ptr interrupt_;          ///< what a signal's handler raised meanwhile
  Mutex mutex_;
  CondVar changed_;
  FutexWaiter futex_waiter_;  ///< for the thread that works
  // guarded by mutex_:
  bool all_marked_ = false;
  bool began_ = false;   ///< the work here
  bool worked_ = false;  ///< the local graph has run to its end
  bool ended_ = false;
  Status failure_;
  std::set<MessageId> marked_;   ///< send functions that take part
  std::set<MessageId> missing_;  ///< those of them whose gradients have not come
  std::vector<Arrival> arrived_;
  size_t outstanding_ = 0;         ///< gradients sent whose receivers have not said that they are done
  std::set<WorkerId> heard_from_;  ///< workers that the pass has come from
  std::set<WorkerId> reached_;     ///< workers that it has gone to from here
  Answer answer_;                  ///< to who began the work here
  std::optional<WorkerId> began_by_;
};

}  // namespace torchrpc
