#pragma once

// A request that a node serves. The object holds what the agent knows of it from its arrival to its answer, and is
// itself what the Responder of the request answers.

#include <memory>
#include <utility>

#include "base/timer.h"
#include "calls/activity.h"
#include "calls/messenger.h"
#include "peers/audit_log.h"
#include "peers/connection_pool.h"
#include "wire/message.h"

namespace torchrpc {

class ServerCall final : public Responder::Target {
 public:
  /// Sends the answers.
  class Answerer {
   public:
    virtual void answer(ServerCall& call, Result<Message>&& result) = 0;

   protected:
    ~Answerer() = default;
  };

  /// `answerer` must outlive this object.
  ServerCall(Answerer& answerer, Peer from, FrameInfo info, TimePoint arrived, std::shared_ptr<Link> link)
      : from(std::move(from)),
        kind(info.kind),
        id(info.call),
        arrived(arrived),
        link(std::move(link)),
        answerer_(answerer) {}
  ~ServerCall() override { failUnanswered(); }

  const Peer from;
  const Kind kind;
  const CallId id;
  const TimePoint arrived;
  const std::shared_ptr<Link> link;  ///< over which it has come; null: this worker has sent it to itself

  // Constant as soon as the request is passed to RequestDispatcher:
  size_t call_bytes = 0;                    ///< of the frame of a call; 0 for other requests
  bool is_counted = false;                  ///< the link and the end of the node count it as unanswered
  bool is_program_timed = false;            ///< ProgramThreads has its arrival
  ActivityToken activity;                   ///< until the answer
  std::shared_ptr<AuditedCall> audit;       ///< null: no audit log
  std::shared_ptr<const void> quota_token;  ///< of its caller, until the answer

  // Used by the one thread that serves the request:
  std::shared_ptr<const void> rref_quota_token;  ///< see Request::rref_quota_token
  Frame frame;                                   ///< until it is decoded
  std::optional<Request> request;                ///< from then on, until a handler takes it

 private:
  void onAnswer(Result<Message>&& result) override { answerer_.answer(*this, std::move(result)); }

  Answerer& answerer_;
};

}  // namespace torchrpc
