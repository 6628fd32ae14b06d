#pragma once

// The requests that a worker makes. Each is entered in the call table, sent, and completed once: by its reply, or by an
// error because it cannot be sent, its time is over, its link is lost, its caller cancels it, or the worker ends. A
// call that may be repeated, and a request that must arrive, consist of several attempts, each of which is such a
// request. Threads: any.

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "calls/activity.h"
#include "calls/call_table.h"
#include "calls/cancelled_calls.h"
#include "calls/client_call.h"
#include "calls/messenger.h"
#include "calls/reliable_requests.h"
#include "calls/repeated_calls.h"
#include "calls/send_faults.h"
#include "peers/connection_pool.h"
#include "peers/liveness.h"
#include "peers/worker_directory.h"
#include "wire/limits.h"

namespace torchrpc {

/// The error of a message that `self` cannot encode. `what`: for example "a call to worker1".
Error unsendableError(const std::string& self, const std::string& what, const Error& error);

class ClientCalls {
 public:
  using ReplyHandler = Messenger::ReplyHandler;

  struct Options {
    Limits limits{};                   ///< of messages
    bool propagate_deadlines = false;  ///< requests carry their deadline
    bool cancel_on_timeout = true;     ///< a call that times out is cancelled on its callee, and not only abandoned
    SendFaultPolicy faults{};          ///< the faults to inject; empty: none
    std::function<uint64_t()> next_random{};  ///< for the pauses between attempts
  };

  /// What the requests need of the node. Everything must outlive the object.
  struct Environment {
    uint64_t node = 0;  ///< the number of the node, as in CurrentCall::node
    Timer& timer;
    const WorkerDirectory& directory;
    ConnectionPool& connections;
    Liveness& liveness;
    Activity& activity;
    /// Serves a request of this worker to itself. Its answer is passed to complete().
    std::function<void(const FrameInfo&, Frame&&)> serve_own;
    /// A call of this worker to itself is cancelled or abandoned.
    std::function<void(CallId, CancelKind)> cancel_own;
    /// Called with a reply that completes no request, because it is late. Resources in it may have to be released.
    std::function<void(const Message&)> discard;
    /// Called when a request has ended, before its handler is; only after reportEnds().
    std::function<void(const ClientCall&)> on_ended;
    /// The part of a time-out's error text about a shortage of threads here; empty if there were enough threads during
    /// the time-out.
    std::function<std::string(Duration timeout)> thread_shortage;
    /// Runs a task on the pool after the delay; drops it if the node ends before.
    std::function<void(Duration, std::function<void()>)> post_after;
  };

  ClientCalls(Options options, Environment environment);

  // Before the first request:
  void observe(CallObserver& observer) { observer_ = &observer; }

  /// Send a request once, or until it is answered. Messenger's functions of these names specify both.
  void request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler);
  void requestReliably(WorkerId to, Message&& message, ReplyHandler&& handler);
  /// Completes a request with kCancelled, and notifies the callee. Returns false if the request has ended already.
  bool cancel(CallId id);

  /// Takes the call of a peer's reply out of the table and completes it. Counts late, repeated and foreign replies.
  void onReply(const Link& link, CallId id, Result<Message>&& result);
  /// Completes a request with the answer of this worker to itself, or with the error for which it could not be sent.
  void complete(CallId id, Result<Message>&& result);
  /// Whether a reply of the worker at the other end of the link would complete that call.
  bool awaits(CallId id, const Link& link) const { return calls_.awaits(id, link.peer().peerId()); }
  /// Fails the requests that were sent over the link, which has ended.
  void onLost(const Link& link, const Error& reason);
  /// Fails all requests with kShutdown, and all that are made later.
  void close();

  /// The error of requests that are open when this worker ends.
  Error closing() const;

  /// Reports the end of each request from now on: see Environment::on_ended.
  void reportEnds() { reports_ends_ = true; }
  /// Whether another worker has answered a call with the error that it is shutting down.
  bool isPeerEnding() const { return is_peer_ending_; }
  /// Waits until the call table has capacity for another call. Returns false after `timeout`.
  bool waitForCapacity(Duration timeout) { return calls_.waitForCapacity(timeout); }
  /// The outstanding requests.
  const CallTable& table() const { return calls_; }
  uint64_t retries() const { return repeated_.retries(); }
  uint64_t lateReplies() const { return late_replies_.load(); }
  uint64_t foreignReplies() const { return foreign_replies_.load(); }

 private:
  const WorkerInfo& self() const { return directory_.self(); }
  WorkerInfo worker(WorkerId id) const { return directory_.info(id); }

  /// Enters the request, whose message has its call id, in the call table and sends it. Completes it at once with an
  /// error if it cannot be encoded, or if there is no such worker.
  void start(
      WorkerId to, const Message& message, Duration timeout, ReplyHandler&& handler, Attempt* attempt = nullptr,
      const ReplyObserver::Note& note = {});
  /// Returns the timeout of a request, limited to the time that is left of the request that this thread serves. Writes
  /// it into the message if the callee has to know it.
  Duration limitTimeout(Message& message, Duration timeout) const;
  /// A request that can be sent.
  struct Outgoing {
    CallId id = 0;
    Kind kind{};
    Frame frame{};
    std::shared_ptr<Link> link{};  ///< null: to this worker itself
    SendFault fault{};             ///< to be injected
  };
  /// Encodes the request, with copies of its tensors if `to` is this worker, and finds its link. Throws Error:
  /// kSerialization, kFrameTooLarge, kUnknownWorker.
  void prepare(Outgoing& out, WorkerId to, const Message& message);
  /// Sends a request whose call is in the call table.
  void send(Outgoing out);
  /// Sends another copy of a request, unless it has ended.
  void sendAgain(WorkerId to, const Message& message);
  /// Returns an error if the worker has been started again since.
  Status checkNotReplaced(PeerId peer) const;

  /// Completes a request that the transport did not send.
  void failUnsent(CallId id, const Error& reason);
  /// Completes a call that has been taken out of the table, with the reply or with an error of this worker.
  void settle(const ClientCall& call, Result<Message>&& result);
  void finish(const ClientCall& call, Result<Message>&& result);
  void onLateReply(const Result<Message>& result);
  void expire();
  void armTimer(TimePoint deadline);
  /// Tells the callee of a call that has been taken out of the table that nobody waits for its result.
  void notifyCallee(const ClientCall& call, CancelKind kind);

  /// Returns a handler that also reports the reply to observer_, for a request that may be sent more than once.
  ReplyHandler observed(WorkerId to, const Message& message, ReplyHandler&& handler);
  /// Sends a call that may be repeated, and sends it again after a loss.
  void requestRepeatedly(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler);
  void attemptCall(const RepeatedCalls::CallPtr& call);
  void attempt(const ReliableRequests::RequestPtr& request);

  // Constant after construction:
  const Options options_;
  const Environment environment_;
  Timer& timer_;
  const WorkerDirectory& directory_;
  ConnectionPool& connections_;
  Liveness& liveness_;
  // Set before the first request:
  CallObserver* observer_ = nullptr;  ///< null: no observer
  // Own synchronization:
  CallTable calls_;
  ReliableRequests reliable_;
  RepeatedCalls repeated_;
  std::atomic<bool> is_closing_{false};
  std::atomic<bool> reports_ends_{false};
  std::atomic<bool> is_peer_ending_{false};
  std::atomic<uint64_t> late_replies_{0};
  std::atomic<uint64_t> foreign_replies_{0};
};

}  // namespace torchrpc
