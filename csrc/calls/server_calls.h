#pragma once

// The requests that a node serves for its peers and for itself: makes the ServerCall of a request that arrives, refuses
// it if the node ends or a quota is used up, passes it to its handler (request_dispatcher.h), and sends the answer.
// Threads: any, unless a function says otherwise.

#include <atomic>
#include <functional>
#include <memory>

#include "base/process.h"
#include "base/timer.h"
#include "calls/activity.h"
#include "calls/ending.h"
#include "calls/program_threads.h"
#include "calls/request_dispatcher.h"
#include "calls/server_call.h"
#include "peers/audit_log.h"
#include "peers/connection_pool.h"
#include "peers/quotas.h"
#include "wire/limits.h"

namespace torchrpc {

class ServerCalls final : public ServerCall::Answerer {
 public:
  using UnsentReplyObserver = std::function<void(const Message&)>;

  /// What the requests need of the node. Everything must outlive the object.
  struct Environment {
    const MakerProcess& maker;
    const Peer& self;
    const Limits& limits;  ///< of messages
    Timer& timer;
    const ConnectionPool& connections;
    Quotas& quotas;
    AuditLog* audit_log;  ///< null: none
    Activity& activity;
    Ending& ending;
    ProgramThreads& program_threads;
    CancelledCalls& cancelled;
    /// Completes a request of this worker to itself.
    std::function<void(CallId, Result<Message>&&)> complete_own;
  };

  ServerCalls(Environment environment, RequestDispatcher::Environment handlers)
      : environment_(std::move(environment)), dispatcher_(std::move(handlers)) {}

  /// The handlers of the kinds of requests.
  RequestDispatcher& handlers() { return dispatcher_; }
  /// Before the first request: see Agent::onUnsentReply().
  void onUnsentReply(UnsentReplyObserver observer) { unsent_reply_observer_ = std::move(observer); }

  /// Serves the request of a peer. On the loop. `bytes_token`: of Link::takeAnnouncedToken().
  void serve(const std::shared_ptr<Link>& link, const FrameInfo& info, Frame&& frame, CallerUsage::Token bytes_token);
  /// Serves a request of this worker to itself.
  void serveOwn(const FrameInfo& info, Frame&& frame);
  /// Answers the INSPECT of an observer: a peer that may read reports and is not a worker. Called on the loop.
  void inspect(const std::shared_ptr<Link>& link, Frame&& frame);

  /// Records in program_threads when each request arrives and is answered, from now on.
  void timeForProgram() { is_program_timed_ = true; }
  /// The requests that no thread serves any more and that are not answered yet.
  std::vector<ServedCall> unanswered() const { return dispatcher_.unanswered(); }
  uint64_t refusedByQuota() const { return refused_by_quota_.load(); }

 private:
  /// Counts a request against the quota of its caller. Throws Error(kQuotaExceeded).
  void takeQuota(ServerCall& call, size_t bytes, CallerUsage::Token bytes_token);
  /// The answer to requests that arrive while this node ends.
  Message endingReply() const;
  void answer(ServerCall& call, Result<Message>&& result) override;
  void record(AuditedCall& call, const Result<Message>& result);
  /// Sends the answer over the link of the request. `activity` lasts until it has been sent.
  void reply(const ServerCall& call, Result<Message>&& result, const ActivityToken& activity);

  const Environment environment_;
  RequestDispatcher dispatcher_;
  UnsentReplyObserver unsent_reply_observer_;  ///< set before the first request
  // Own synchronization:
  std::atomic<bool> is_program_timed_{false};
  std::atomic<uint64_t> refused_by_quota_{0};
};

}  // namespace torchrpc
