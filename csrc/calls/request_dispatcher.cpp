#include "calls/request_dispatcher.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/exception.h"
#include "calls/current_call.h"
#include "calls/repeatable_header.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

/// Whether only members may send the message: it belongs to the group's own work, or is a call that takes part in it.
/// A call of a client may have the header AutogradLiveSets. It is served, and the header is ignored.
bool isForMembers(const Message& message) {
  constexpr HeaderKind kOfMembers[] = {HeaderKind::kAutogradContext, HeaderKind::kProfiling};
  return isForMembers(message.kind) || std::ranges::any_of(message.headers, [&](const Header& header) {
           return std::ranges::find(kOfMembers, header.kind) != std::end(kOfMembers);
         });
}

/// The deadline that a request carries, or kNever.
TimePoint deadlineOf(const Message& request, TimePoint arrived) {
  const auto* header = request.header(HeaderKind::kDeadline);
  if (!header) return kNever;
  return deadlineAfter(std::chrono::nanoseconds(Reader(*header).get<int64_t>()), arrived);
}

}  // namespace

void RequestDispatcher::on(Kind kind, Where where, Messenger::RequestHandler handler) {
  const bool runs_user_function = isCall(kind) && traitsOf(kind).callable != CallableType::kOperator;
  Handler added{.where = where, .serve = std::move(handler), .runs_user_function = runs_user_function};
  TORCH_INTERNAL_ASSERT(handlers_.emplace(kind, std::move(added)).second, "two handlers for a kind");
}

template <typename Serve>
void RequestDispatcher::runOrAnswer(const Responder& responder, const Serve& serve) const {
  const auto fail = [&responder](Error error) { responder.fail(std::move(error)); };
  runOrFail(serve, fail, ErrorCode::kUnknown, environment_.self.name);
}

void RequestDispatcher::decode(ServerCall& call) {
  call.request.emplace(Request{
      .from = call.from,
      .message = environment_.decode(std::move(call.frame), call.from.id).take(),
      .link = call.link ? call.link->id() : 0,
      .audit = call.audit,
      .rref_quota_token = std::move(call.rref_quota_token)});
  if (call.from.is_member || !isForMembers(call.request->message)) return;
  throw Error(
      ErrorCode::kNotAllowed,
      environment_.self.name + " refuses " + std::string(name(call.kind)) + " from " + call.from.name +
          ", which is a client: only members of the group may take part in autograd, optimizers and profiles. Give " +
          call.from.name + " an identity with the role member if it may",
      environment_.self.name);
}

void RequestDispatcher::serve(const ServerCallPtr& call, Frame&& frame) {
  const Responder responder(call);
  const auto it = handlers_.find(call->kind);
  if (it == handlers_.end()) {
    const auto& self = environment_.self.name;
    const auto text = self + " does not serve messages of kind " + std::string(name(call->kind));
    return responder.fail(Error(ErrorCode::kProtocol, text, self));
  }
  const auto& handler = it->second;
  const bool may_keep = !environment_.gate.isOpen() && handler.runs_user_function && call->link;
  call->frame = std::move(frame);
  // Decoding is the most expensive step: the thread of the pool that serves the request does it, not the loop.
  if (handler.where == Where::kPool && !handler.loop_first) return serveLater(handler, call, may_keep);
  runOrAnswer(responder, [&] {
    decode(*call);
    if (handler.where == Where::kLoop) {
      const auto record = recordOf(*call);
      showToObserver(*call->request, responder);
      handler.serve(*std::move(call->request), responder);
      call->request.reset();
      return unanswered_.add(record, responder);
    }
    if (handler.loop_first) {
      showToObserver(*call->request, responder);
      if (handler.loop_first(*call->request, responder)) return;
    }
    serveLater(handler, call, may_keep && !environment_.is_group_function(call->request->message));
  });
}

void RequestDispatcher::serveLater(const Handler& handler, const ServerCallPtr& call, bool may_keep) {
  if (may_keep) {
    CallGate::Task later = [this, &handler, call] { post(handler, call); };
    if (environment_.gate.keep(later)) return;
  }
  post(handler, call);
}

bool RequestDispatcher::post(const Handler& handler, const ServerCallPtr& call, bool was_deferred) {
  const auto source = call->link ? call->link->peer().id : kOwnTasks;
  Executor::Task task = [this, &handler, call, was_deferred] {
    if (!was_deferred) return begin(handler, call);
    call->link->replyQueue().onResumedStart();
    run(handler, call);
  };
  const bool is_posted = handler.where == Where::kStrand ? environment_.strand.post(std::move(task), source)
                                                         : environment_.pool.post(std::move(task), source);
  if (!is_posted) Responder(call).fail(environment_.closing());
  return is_posted;
}

void RequestDispatcher::begin(const Handler& handler, const ServerCallPtr& call) {
  const auto link = call->link;  // the call may end before defer() returns
  if (!link || !carriesValues(call->kind) || !link->replyQueue().shouldDefer()) return run(handler, call);
  link->replyQueue().defer([this, &handler, call] { return post(handler, call, /*was_deferred=*/true); });
}

void RequestDispatcher::run(const Handler& handler, const ServerCallPtr& call) {
  const Responder responder(call);
  reportStart(*call);
  // The sender may have been started again while the request waited. Its effects would count as those of the later
  // peer.
  if (call->link && call->link->isReplaced()) return responder.fail(replacedError(call->link->peer()));
  runOrAnswer(responder, [&] {
    if (!call->request) decode(*call);
    const auto record = recordOf(*call);
    const auto id = call->request->id();
    if (environment_.cancelled.isCancelled(id)) {
      environment_.not_served(call->request->message);
      return responder.fail(
          Error(ErrorCode::kCancelled, "the call was cancelled before it began", environment_.self.name));
    }
    const CallScope scope(
        {.deadline = deadlineOf(call->request->message, call->arrived), .node = environment_.node, .id = id});
    {
      const ServedScope served(record);
      handle(handler, *std::move(call->request), responder);
    }
    call->request.reset();
    unanswered_.add(record, responder);
  });
}

void RequestDispatcher::handle(const Handler& handler, Request&& request, const Responder& responder) {
  const auto* bytes = request.message.header(HeaderKind::kRepeatable);
  // For calls that keep their result here, CallService looks for earlier arrivals.
  if (!bytes || traitsOf(request.message.kind).operation != Operation::kCall) {
    if (!responder.isObserved()) showToObserver(request, responder);
    return handler.serve(std::move(request), responder);
  }
  if (auto once = environment_.keyed.begin(request, RepeatableHeader::decode(*bytes), responder)) {
    showToObserver(request, *once);
    runOrAnswer(*once, [&] { handler.serve(std::move(request), *once); });
  } else {
    environment_.not_served(request.message);
  }
}

void RequestDispatcher::showToObserver(const Request& request, const Responder& responder) const {
  if (!observer_) return;
  if (const auto note = observer_->onServe(request); note.isSet()) responder.observe(*observer_, note);
}

void RequestDispatcher::reportStart(const ServerCall& call) {
  if (!call.link) return;
  const auto report = call.link->startedCalls().onStarted(call.id, call.call_bytes);
  if (!report) return;
  call.link->send(encodeFrame({.kind = Kind::kStarted, .payload = report->encode()}), [](const Status&) {});
}

ServedCall RequestDispatcher::recordOf(const ServerCall& call) const {
  ServedCall record;
  record.node = environment_.node;
  record.call = call.id;
  record.from = call.from.id;
  record.kind = call.kind;
  record.since = call.arrived;
  record.setPayload(call.request->message.payload);
  return record;
}

}  // namespace torchrpc
