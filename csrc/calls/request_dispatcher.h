#pragma once

// Passes requests that have arrived to the handlers of their kinds, on the threads on which these are registered to
// run. On the way a request may be kept (call_gate.h), deferred (Note [Flow control]), found cancelled, or found to
// have arrived before (keyed_calls.h). Threads: any, unless a function says otherwise.

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/executor/executor.h"
#include "base/executor/strand.h"
#include "calls/call_gate.h"
#include "calls/cancelled_calls.h"
#include "calls/keyed_calls.h"
#include "calls/messenger.h"
#include "calls/server_call.h"
#include "calls/unanswered_calls.h"

namespace torchrpc {

class RequestDispatcher {
 public:
  using Where = Messenger::Where;
  using ServerCallPtr = std::shared_ptr<ServerCall>;

  /// What it uses of the agent. All must outlive it.
  struct Environment {
    const WorkerInfo& self;
    uint64_t node;  ///< the number of the node: see CurrentCall
    Executor& pool;
    Strand& strand;
    CallGate& gate;
    CancelledCalls& cancelled;
    KeyedCalls& keyed;
    std::function<bool(const Message&)> is_group_function;  ///< Agent::isGroupFunction()
    std::function<Result<Message>(Frame&&, WorkerId from)> decode;
    std::function<Error()> closing;  ///< the answer to requests for which the pool has no thread any more
    /// Called with requests that are not served. Resources in them may have to be released.
    std::function<void(const Message&)> not_served;
  };

  explicit RequestDispatcher(Environment environment) : environment_(std::move(environment)) {}

  // Before the first request: see Messenger and Agent::observeCalls().
  void on(Kind kind, Where where, Messenger::RequestHandler handler);
  void onLoopFirst(Kind kind, Messenger::LoopHandler handler) { handlers_.at(kind).loop_first = std::move(handler); }
  void observe(CallObserver& observer) { observer_ = &observer; }

  /// Serves the request in the frame. Called on the loop, or on the thread that has made a request to its own worker.
  void serve(const ServerCallPtr& call, Frame&& frame);
  /// The requests that no thread serves any more and that are not answered yet.
  std::vector<ServedCall> unanswered() const { return unanswered_.all(); }

 private:
  struct Handler {
    Where where = Where::kPool;
    Messenger::RequestHandler serve;
    Messenger::LoopHandler loop_first{};
    bool runs_user_function = false;  ///< no torch operator
  };

  /// Decodes the request. Throws Error; kNotAllowed if the sender is a client, and only members may send the request.
  void decode(ServerCall& call);
  /// Serves the request on the pool or in the strand. `may_keep`: not before the gate opens.
  void serveLater(const Handler& handler, const ServerCallPtr& call, bool may_keep);
  /// Posts the request to the executor of its handler. If that is closed, answers with an error and returns false.
  bool post(const Handler& handler, const ServerCallPtr& call, bool was_deferred = false);
  /// Serves the request on its executor, or defers it.
  void begin(const Handler& handler, const ServerCallPtr& call);
  void run(const Handler& handler, const ServerCallPtr& call);
  /// Calls the handler, unless the same request has arrived before.
  void handle(const Handler& handler, Request&& request, const Responder& responder);
  /// Shows the request to the observer, which is informed of its answer if it wants that.
  void showToObserver(const Request& request, const Responder& responder) const;
  static void reportStart(const ServerCall& call);
  /// Runs `serve`, and answers with the error that it throws.
  template <typename Serve>
  void runOrAnswer(const Responder& responder, const Serve& serve) const;
  /// The entry of the request in a thread record.
  ServedCall recordOf(const ServerCall& call) const;

  const Environment environment_;
  // Set before the first request:
  std::map<Kind, Handler> handlers_;
  CallObserver* observer_ = nullptr;  ///< null: no observer
  // Own synchronization:
  UnansweredCalls unanswered_;
};

}  // namespace torchrpc
