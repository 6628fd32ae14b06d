#include "calls/server_calls.h"

#include <utility>

#include "calls/client_calls.h"
#include "wire/codec.h"

namespace torchrpc {

void ServerCalls::serve(
    const std::shared_ptr<Link>& link, const FrameInfo& info, Frame&& frame, CallerUsage::Token bytes_token) {
  const auto call = std::make_shared<ServerCall>(*this, link->peer(), info, environment_.timer.now(), link);
  call->is_counted = isCounted(info.kind);
  call->call_bytes = isCall(info.kind) ? bytesOf(frame) : 0;
  call->activity = ActivityToken(environment_.activity);
  if (call->is_counted) link->addUnanswered();
  call->is_program_timed = call->is_counted && is_program_timed_.load(std::memory_order_relaxed);
  if (call->is_program_timed) environment_.program_threads.onArrived(call->arrived);
  Status over_quota;
  if (frame.failure && frame.failure->code() == ErrorCode::kQuotaExceeded) over_quota = *frame.failure;
  if (call->is_counted && !over_quota && (link->usage() || (environment_.quotas.limitsCalls() && isCall(info.kind)))) {
    try {
      takeQuota(*call, bytesOf(frame), std::move(bytes_token));
    } catch (const Error& error) {
      over_quota = error;
    }
  }
  const bool is_refused = over_quota || (isForMembers(info.kind) && !call->from.is_member);
  if (environment_.audit_log && (call->is_counted || is_refused)) {
    call->audit = std::make_shared<AuditedCall>(link->nameForAudit(link->peer().name), info.kind, bytesOf(frame));
  }
  const Responder responder(call);
  if (call->is_counted && environment_.ending.hasBegun()) {
    link->requireReader();
    return responder.reply(endingReply());
  }
  if (over_quota) {
    refused_by_quota_.fetch_add(1, std::memory_order_relaxed);
    return responder.fail(*std::move(over_quota));
  }
  // Reports do not wait in line, as calls do, until the peer has read its replies.
  if (info.kind == Kind::kInspect && link->replyQueue().shouldDefer()) {
    const auto& name = link->peer().name;
    return responder.fail(Error(
        ErrorCode::kQuotaExceeded, name + " has not read the replies to its earlier requests", environment_.self.name));
  }
  link->startedCalls().onArrived(call->call_bytes);
  dispatcher_.serve(call, std::move(frame));
}

void ServerCalls::takeQuota(ServerCall& call, size_t bytes, CallerUsage::Token bytes_token) {
  if (const auto& error = call.link->refusal()) throw *error;
  if (const auto& usage = call.link->usage()) {
    call.quota_token = usage->takeCall(bytes, std::move(bytes_token));
    if (traitsOf(call.kind).operation == Operation::kRemote) call.rref_quota_token = usage->takeRRef();
  }
  if (!environment_.quotas.limitsCalls() || !isCall(call.kind)) return;
  using Both = std::pair<CallerUsage::Token, CallerUsage::Token>;
  call.quota_token = std::make_shared<Both>(std::move(call.quota_token), environment_.quotas.takeCall());
}

Message ServerCalls::endingReply() const {
  const auto& name = environment_.self.name;
  auto reply = encodeError({ErrorCode::kShutdown, name + " is shutting down and accepts no more calls", name});
  // The header says that the call has not begun: it may be sent again to a worker that is started in this one's place.
  reply.headers.push_back({HeaderKind::kRepeatable, {}});
  return reply;
}

void ServerCalls::serveOwn(const FrameInfo& info, Frame&& frame) {
  const auto call = std::make_shared<ServerCall>(*this, environment_.self, info, environment_.timer.now(), nullptr);
  call->activity = ActivityToken(environment_.activity);  // the call that is made may end before the function does
  dispatcher_.serve(call, std::move(frame));
}

void ServerCalls::inspect(const std::shared_ptr<Link>& link, Frame&& frame) {
  const auto name = link->provedName();
  if (link->replyQueue().shouldDefer() || link->replyQueue().isOverrun()) {
    return link->cutOff({ErrorCode::kProtocol, "an observer does not read the reports for which it asks", name});
  }
  const Peer observer{{name.empty() ? "an observer" : name, kNoWorker}};
  const auto call =
      std::make_shared<ServerCall>(*this, observer, *peekFrame(frame.head), environment_.timer.now(), link);
  if (link->mayInspect()) return dispatcher_.serve(call, std::move(frame));
  Responder(call).fail(Error(
      ErrorCode::kNotAllowed,
      environment_.self.name + " does not let " + name + " inspect it: give it an identity with the role observer",
      environment_.self.name));
}

void ServerCalls::answer(ServerCall& call, Result<Message>&& result) {
  const auto activity = std::move(call.activity);
  call.quota_token.reset();  // before the caller can have the answer and make another call
  if (!call.link) {
    environment_.cancelled.onAnswered({0, call.id});
    try {
      result =
          result ? Result<Message>(copyMessage(result.value())) : namedError(result.error(), environment_.self.name);
    } catch (const Error& error) {
      result = unsendableError(environment_.self.name, "the result to itself", error).withOrigin(ErrorOrigin::kResult);
    }
    return environment_.complete_own(call.id, std::move(result));
  }
  if (call.audit) {
    record(*call.audit, result);
  } else if (environment_.audit_log && !result) {
    environment_.connections.recordRefusal(call.link->nameForAudit(), result.error(), name(call.kind));
  }
  reply(call, std::move(result), activity);
  if (call.is_counted) call.link->removeUnanswered();
  if (call.is_program_timed) environment_.program_threads.onAnswered(call.arrived);
  environment_.cancelled.onAnswered({call.link->id(), call.id});
  environment_.ending.notify();
}

void ServerCalls::record(AuditedCall& call, const Result<Message>& result) {
  if (result && result.value().kind == Kind::kError) {
    const auto error = decodeError(result.value());
    return environment_.audit_log->record(call.finish(&error, 0));
  }
  environment_.audit_log->record(
      result ? call.finish(nullptr, result.value().bytes()) : call.finish(&result.error(), 0));
}

void ServerCalls::reply(const ServerCall& call, Result<Message>&& result, const ActivityToken& activity) {
  if (!environment_.maker.isThisOne()) return;  // the function has forked, and this is the child
  const auto& link = call.link;
  auto message = result ? std::move(result).value() : encodeError(namedError(result.error(), environment_.self.name));
  message.call = call.id;
  Frame frame;
  try {
    frame = encodeFrame(message, environment_.limits);
  } catch (const Error& e) {
    if (unsent_reply_observer_) unsent_reply_observer_(message);
    const auto unsendable = unsendableError(environment_.self.name, "the result to " + call.from.name, e);
    message = encodeError(unsendable.withOrigin(ErrorOrigin::kResult));
    message.call = call.id;
    frame = encodeFrame(message, environment_.limits);
  }
  link->startedCalls().onAnswered(call.id);
  const auto bytes = bytesOf(frame);
  link->replyQueue().onReply(bytes);
  // The link may belong to an earlier start of the caller: then this fails although the worker itself is not lost.
  link->send(
      std::move(frame),
      [this, link, bytes, token = activity, kind = message.kind,
       headers = std::move(message.headers)](const Status& failure) {
        link->replyQueue().onReplySent(bytes);
        if (failure && unsent_reply_observer_) unsent_reply_observer_({.kind = kind, .headers = headers});
      });
}

}  // namespace torchrpc
