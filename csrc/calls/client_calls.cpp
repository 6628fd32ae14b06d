#include "calls/client_calls.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "calls/current_call.h"
#include "calls/repeatable_header.h"
#include "calls/thread_record.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

/// The error of a request whose connection has ended.
Error lostError(const WorkerInfo& peer, const Error& reason) {
  return {ErrorCode::kWorkerLost, "the connection to " + toString(peer) + " was lost: " + reason.text(), peer.name};
}

std::string deadlineHeader(Duration timeout) {
  std::string bytes;
  Writer(bytes).put(static_cast<int64_t>(std::chrono::nanoseconds(timeout).count()));
  return bytes;
}

/// The transport's error for a frame that it did not send, as the caller's error.
Error unsentError(const WorkerInfo& to, const Error& reason) {
  return reason.code() == ErrorCode::kFrameTooLarge ? reason : lostError(to, reason);
}

}  // namespace

Error unsendableError(const std::string& self, const std::string& what, const Error& error) {
  return {error.code(), self + " cannot send " + what + ": " + error.text(), self};
}

ClientCalls::ClientCalls(Options options, Environment environment)
    : options_(std::move(options)),
      environment_(std::move(environment)),
      timer_(environment_.timer),
      directory_(environment_.directory),
      connections_(environment_.connections),
      liveness_(environment_.liveness),
      reliable_(
          timer_,
          {.send = [this](const auto& request) { attempt(request); },
           .resend = [this](const auto& request) { sendAgain(request.to.worker, request.message); }}),
      repeated_(
          timer_,
          {.send = [this](const auto& call) { attemptCall(call); },
           .post_after = environment_.post_after,
           .peer_id = [this](WorkerId id) { return directory_.peerId(id); },
           .worker = [this](WorkerId id) { return worker(id); },
           .next_random = options_.next_random}) {}

Error ClientCalls::closing() const {
  return {ErrorCode::kShutdown, "RPC is shutting down on " + self().name + ": the call was not completed", self().name};
}

// --- One request ---

void ClientCalls::request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) {
  if (message.repetition) return requestRepeatedly(to, std::move(message), timeout, std::move(handler));
  const auto note = observer_ ? observer_->onRequest(to, message) : ReplyObserver::Note();
  timeout = limitTimeout(message, timeout);
  message.call = calls_.nextId();
  start(to, message, timeout, std::move(handler), nullptr, note);
}

void ClientCalls::start(
    WorkerId to, const Message& message, Duration timeout, ReplyHandler&& handler, Attempt* attempt,
    const ReplyObserver::Note& note) {
  const auto id = message.call;
  ClientCall call{.to = to, .timeout = timeout, .since = timer_.now(), .kind = message.kind, .bytes = message.bytes()};
  call.deadline = deadlineAfter(timeout, call.since);
  auto& record = ThreadRecord::ofThisThread();
  record.setLastCall(id);
  call.thread = record.thread();
  // Not requests of protocols between nodes, which must arrive.
  const auto operation = traitsOf(message.kind).operation;
  const bool is_for_caller = operation == Operation::kCall || operation == Operation::kFetch;
  const auto& served = currentCall();
  if (is_for_caller && served.node == environment_.node && served.ends_calls) call.made_for = served.id;
  call.token = ActivityToken(environment_.activity);
  call.handler = std::move(handler);
  call.attempt = attempt;
  call.note = note;
  Outgoing out{.id = id, .kind = message.kind};
  if (is_closing_) return finish(call, closing());
  try {
    prepare(out, to, message);
  } catch (const Error& error) {
    return finish(call, error);
  }
  if (out.link) {
    call.link = out.link->id();
    call.callee = out.link->peer().peerId();
  }
  const auto deadline = call.deadline;
  bool needs_timer = false;
  if (!calls_.add(id, call, needs_timer)) return finish(call, closing());
  // From now on the message may belong to a later attempt.
  if (needs_timer) armTimer(deadline);
  liveness_.onRequest();
  send(std::move(out));
}

void ClientCalls::prepare(Outgoing& out, WorkerId to, const Message& message) {
  const bool is_own = to == self().id;
  try {
    out.frame = is_own ? encodeCopy(message, options_.limits) : encodeFrame(message, options_.limits);
  } catch (const Error& error) {
    throw unsendableError(self().name, "a call to " + worker(to).name, error);
  }
  if (!is_own) out.link = connections_.link(to);
  if (options_.faults) out.fault = options_.faults(message);
}

void ClientCalls::send(Outgoing out) {
  if (out.fault.fail) return failUnsent(out.id, {ErrorCode::kWorkerLost, "this fault was injected"});
  const auto delay = std::exchange(out.fault.delay, Duration::zero());
  if (delay > Duration::zero()) {
    const auto delayed = std::make_shared<Outgoing>(std::move(out));
    timer_.after(delay, [this, delayed] { send(std::move(*delayed)); });
    return;
  }
  if (!out.link) return environment_.serve_own({out.kind, out.id}, std::move(out.frame));
  const auto done = [this, id = out.id](const Status& failure) {
    if (failure) failUnsent(id, *failure);
  };
  // Other requests are small, or belong to protocols between nodes that must not wait.
  if (isCall(out.kind)) return out.link->sendCall(out.id, std::move(out.frame), done);
  out.link->send(std::move(out.frame), done);
}

void ClientCalls::sendAgain(WorkerId to, const Message& message) {
  Outgoing out{.id = message.call, .kind = message.kind};
  if (!calls_.contains(out.id)) return;  // it has ended, or is between two attempts
  try {
    prepare(out, to, message);
  } catch (const Error& error) {
    return complete(out.id, error);
  }
  if (out.link) calls_.assign(out.id, out.link->id(), out.link->peer().peerId());
  send(std::move(out));
}

Duration ClientCalls::limitTimeout(Message& message, Duration timeout) const {
  const auto deadline = currentDeadline();
  // Messages of protocols between nodes must arrive, whatever the deadline of the program.
  if ((!options_.propagate_deadlines && deadline == kNever) || !carriesValues(message.kind)) return timeout;
  if (deadline != kNever) timeout = std::min(timeout, std::max<Duration>(deadline - timer_.now(), Duration(1)));
  if (timeout == kNoLimit) return timeout;
  message.headers.push_back({HeaderKind::kDeadline, deadlineHeader(timeout)});
  return timeout;
}

Status ClientCalls::checkNotReplaced(PeerId peer) const {
  if (!peer.isKnown() || !peer.isReplacedBy(directory_.peerId(peer.worker))) return std::nullopt;
  return replacedError(worker(peer.worker));
}

void ClientCalls::failUnsent(CallId id, const Error& reason) {
  if (auto call = calls_.take(id)) finish(*call, unsentError(worker(call->to), reason));
}

// --- The end of a request ---

void ClientCalls::finish(const ClientCall& call, Result<Message>&& result) {
  if (reports_ends_.load(std::memory_order_relaxed)) environment_.on_ended(call);
  if (call.note.isSet()) observer_->onReply(call.note, result);
  call.handler(std::move(result));
}

void ClientCalls::settle(const ClientCall& call, Result<Message>&& result) {
  if (call.attempt && result) {
    const auto& reply = result.value();
    call.attempt->is_answered = true;
    call.attempt->is_refused = reply.kind == Kind::kError && reply.header(HeaderKind::kRepeatable);
  }
  if (result && result.value().kind == Kind::kError) {
    try {
      result = decodeError(result.value());
    } catch (const Error& e) {
      result = e;
    }
    if (result.error().code() == ErrorCode::kShutdown && call.to != self().id) is_peer_ending_ = true;
  }
  finish(call, std::move(result));
}

void ClientCalls::complete(CallId id, Result<Message>&& result) {
  if (const auto call = calls_.take(id)) return settle(*call, std::move(result));
  onLateReply(result);
}

// Call ids are consecutive numbers, so any member can guess them: a reply counts only if it comes from the worker to
// which the call was sent. Resources in foreign replies are not released, because they belong to their sender.
void ClientCalls::onReply(const Link& link, CallId id, Result<Message>&& result) {
  bool is_foreign = false;
  if (const auto call = calls_.takeFor(id, link.peer().peerId(), is_foreign)) {
    return settle(*call, std::move(result));
  }
  if (!is_foreign) return onLateReply(result);
  foreign_replies_.fetch_add(1, std::memory_order_relaxed);
}

void ClientCalls::onLateReply(const Result<Message>& result) {
  late_replies_.fetch_add(1, std::memory_order_relaxed);
  if (result) environment_.discard(result.value());
}

void ClientCalls::onLost(const Link& link, const Error& reason) {
  for (auto& call : calls_.takeLink(link.id())) {
    if (call.attempt) call.attempt->reached = call.callee;
    finish(call, lostError(link.peer(), reason));
  }
}

void ClientCalls::close() {
  is_closing_ = true;
  for (auto& call : calls_.close()) finish(call, closing());
  reliable_.close(closing());
  repeated_.close(closing());
}

void ClientCalls::armTimer(TimePoint deadline) {
  timer_.at(deadline, [this] { expire(); });
}

void ClientCalls::expire() {
  TimePoint next;
  auto expired = calls_.takeExpired(timer_.now(), next);
  if (next != kNever) armTimer(next);
  for (auto& call : expired) {
    const auto timeout = call.attempt ? call.attempt->timeout : call.timeout;
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
    const auto to = worker(call.to);
    const auto link = connections_.find(call.link);
    const auto why_not_open = link ? link->whyNotOpen() : "";
    const Error error(
        ErrorCode::kTimeout,
        "RPC ran for more than set timeout (" + std::to_string(ms) +
            " ms) and will now be marked with an error: " + to.name + " has not replied" +
            (why_not_open.empty() ? "" : ", because the connection to it is not open: " + why_not_open) +
            ". Pass a longer timeout to the call, or a longer default to the worker (in Python rpc_timeout of its "
            "options, in C++ NodeOptions::timeout)" +
            environment_.thread_shortage(call.timeout),
        to.name);
    finish(call, error);
    // An attempt of a call that may be repeated is not cancelled: a later one may need its result.
    const bool runs_call = traitsOf(call.kind).operation == Operation::kCall && !call.attempt;
    if (runs_call) notifyCallee(call, options_.cancel_on_timeout ? CancelKind::kStop : CancelKind::kAbandon);
  }
}

bool ClientCalls::cancel(CallId id) {
  const auto call = calls_.take(id);
  if (!call) return false;
  const auto to = worker(call->to);
  finish(*call, Error(ErrorCode::kCancelled, "the call to " + to.name + " was cancelled by its caller", to.name));
  notifyCallee(*call, CancelKind::kStop);
  return true;
}

void ClientCalls::notifyCallee(const ClientCall& call, CancelKind kind) {
  if (call.to == self().id) return environment_.cancel_own(call.id, kind);
  const auto link = connections_.find(call.link);
  if (!link) return;
  std::string payload;
  Writer writer(payload);
  writer.put(call.id);
  writer.put(kind);
  // Sent as a call, so that it does not overtake a call that is held back.
  link->sendCall(
      calls_.nextId(), encodeFrame({.kind = Kind::kCancel, .payload = std::move(payload)}), [](const Status&) {});
}

// --- Calls that may be repeated ---

Messenger::ReplyHandler ClientCalls::observed(WorkerId to, const Message& message, ReplyHandler&& handler) {
  const auto note = observer_ ? observer_->onRequest(to, message) : ReplyObserver::Note();
  if (!note.isSet()) return std::move(handler);
  return [this, note, handler = std::move(handler)](Result<Message> result) {
    observer_->onReply(note, result);
    handler(std::move(result));
  };
}

void ClientCalls::requestRepeatedly(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) {
  const auto repetition = std::exchange(message.repetition, nullptr);
  const auto refuse = [&](const std::string& text) {
    handler(Error(ErrorCode::kInvalidArgument, text, worker(to).name));
  };
  if (!isCall(message.kind)) return refuse("only calls can be repeated");
  if (repetition->policy.retries > 0 && message.header(HeaderKind::kRRefForks)) {
    return refuse(
        "a call with RRefs among its arguments cannot have retries, because RRefs are lost with the connection to " +
        worker(to).name + ": send the values, or give it an idempotency key alone");
  }
  timeout = limitTimeout(message, timeout);
  const auto call = std::make_shared<RepeatedCalls::Call>();
  call->to = to;
  call->timeout = timeout;
  call->deadline = deadlineAfter(timeout, timer_.now());
  call->has_deadline_header = message.header(HeaderKind::kDeadline) != nullptr;
  if (!repetition->key.empty()) call->digest = digestOf(message);
  call->repetition = repetition;
  call->token = ActivityToken(environment_.activity);
  call->handler = observed(to, message, std::move(handler));
  call->message = std::move(message);
  repeated_.add(call);
}

void ClientCalls::attemptCall(const RepeatedCalls::CallPtr& call) {
  auto& message = call->message;
  const bool after_restart = call->repetition->policy.after_restart;
  const RepeatableHeader header{
      .key = call->repetition->key,
      .number = call->number,
      .oldest = call->number == 0 ? 0 : repeated_.oldestNumber(call->to),
      .incarnation = after_restart ? 0 : call->may_have_run_on.incarnation,
      .digest = call->digest,
      .attempt = call->attempts};
  message.setHeader(HeaderKind::kRepeatable, header.encode());
  auto timeout = call->timeout;
  if (call->deadline != kNever) timeout = std::max<Duration>(call->deadline - timer_.now(), Duration(1));
  if (call->has_deadline_header) message.setHeader(HeaderKind::kDeadline, deadlineHeader(timeout));
  message.call = calls_.nextId();
  // No error in this worker's answer to itself means that a worker was lost.
  call->attempt = {.timeout = call->timeout, .is_answered = call->to == self().id};
  start(
      call->to, message, timeout,
      [this, call](Result<Message> result) { repeated_.onAttempt(call, std::move(result)); }, &call->attempt);
}

// --- Requests that must arrive ---

namespace {
constexpr int kMaxLostAttempts = 8;
constexpr Duration kLongestPause = std::chrono::seconds(2);
}  // namespace

void ClientCalls::requestReliably(WorkerId to, Message&& message, ReplyHandler&& handler) {
  TORCH_INTERNAL_ASSERT(isReliable(message.kind), "not an idempotent kind: ", name(message.kind));
  auto observed_handler = observed(to, message, std::move(handler));
  message.call = calls_.nextId();
  reliable_.add(std::make_shared<ReliableRequests::Request>(
      directory_.peerId(to), std::move(message), Responder(std::move(observed_handler)),
      ActivityToken(environment_.activity)));
}

void ClientCalls::attempt(const ReliableRequests::RequestPtr& request) {
  if (const auto replaced = checkNotReplaced(request->to)) {
    // is_lost is false, because waiting requests may have been made for the later start of the worker.
    return reliable_.finish(request, lostError(worker(request->to.worker), *replaced), /*is_lost=*/false);
  }
  if (liveness_.isSilent(request->to.worker)) {
    const auto to = worker(request->to.worker);
    const auto error = lostError(to, {ErrorCode::kWorkerLost, to.name + " is silent", to.name});
    return reliable_.finish(request, error, /*is_lost=*/true);
  }
  start(request->to.worker, request->message, kNoLimit, [this, request](Result<Message> result) {
    const auto code = result ? ErrorCode::kUnknown : result.error().code();
    const bool is_lost = code == ErrorCode::kWorkerLost;
    if (is_lost) ++request->lost_attempts;
    // A time-out is an answer of the peer, because this side has set none.
    const bool may_retry = code == ErrorCode::kTimeout || (is_lost && request->lost_attempts < kMaxLostAttempts);
    if (result || !may_retry || is_closing_) {
      // The peer may also answer that another worker is lost.
      const bool is_unreachable = is_lost && result.error().worker() == worker(request->to.worker).name;
      return reliable_.finish(request, std::move(result), is_unreachable);
    }
    const auto next_pause = std::min<Duration>(request->pause * 2, kLongestPause);
    const auto pause = std::exchange(request->pause, next_pause);
    timer_.after(pause, [this, request] { attempt(request); });  // may already run on the timer's thread
  });
}

}  // namespace torchrpc
