#include "agent/agent.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "agent/current_call.h"
#include "agent/repeatable_header.h"
#include "base/exception.h"
#include "base/os/threads.h"
#include "base/random.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

/// The time for the audit log to be written when the node has ended.
constexpr Duration kAuditFlushTime = std::chrono::seconds(5);

/// The time-out of a worker's answer to a ping if liveness has no limit.
constexpr Duration kPingTimeout = std::chrono::seconds(30);

Error lostError(const WorkerInfo& peer, const Error& reason) {
  return {ErrorCode::kWorkerLost, "the connection to " + toString(peer) + " was lost: " + reason.text(), peer.name};
}

size_t bytesOf(const Message& message) { return message.payload.size() + message.tensorBytes(); }

std::shared_ptr<Executor> makeThreadPool(const Agent::Options& options, Transport& transport) {
  return std::make_shared<ThreadPool>(ThreadPool::Options{
      .size = options.threads,
      .max_size = options.max_threads,
      .name = "torchrpc",
      .poll_before_park = [&transport](const std::function<bool()>& done) { transport.poll(done); },
      .park = [&transport](
                  const std::function<bool()>& done,
                  FutexWaiter& waiter) { transport.park(done, waiter, kNever, /*preemptible=*/true); }});
}

std::string deadlineHeader(Duration timeout) {
  std::string bytes;
  Writer(bytes).put(static_cast<int64_t>(std::chrono::nanoseconds(timeout).count()));
  return bytes;
}

/// The error for a message that `self` cannot encode. `what`: for example "a call to worker1".
Error unsendableError(const std::string& self, const std::string& what, const Error& error) {
  return {error.code(), self + " cannot send " + what + ": " + error.text(), self};
}

/// The transport's error for a frame that it did not send, as the caller's error.
Error unsentError(const WorkerInfo& to, const Error& reason) {
  return reason.code() == ErrorCode::kFrameTooLarge ? reason : lostError(to, reason);
}

}  // namespace

namespace {
uint64_t nextNodeNumber() {
  static std::atomic<uint64_t> number{0};
  return ++number;
}
}  // namespace

Agent::Agent(Options options, std::unique_ptr<Transport> transport, std::shared_ptr<Timer> timer)
    : options_(std::move(options)),
      number_(nextNodeNumber()),
      directory_(options_.self),
      timer_(std::move(timer)),
      transport_(std::move(transport)),
      quotas_(options_.self.name, options_.quotas, options_.max_calls),
      connections_(
          *transport_, directory_,
          {.incarnation = options_.incarnation,
           .world_size = options_.world_size,
           .max_queued_bytes = options_.max_queued_bytes,
           .quotas = quotas_.empty() ? nullptr : &quotas_,
           .audit_log = options_.audit_log},
          {.on_new_incarnation = [this](const Peer& peer) { onNewIncarnation(peer); },
           .on_frame = [this](const auto& link, Frame frame) { onFrame(link, std::move(frame)); },
           .is_lost = [this](const WorkerInfo& worker) { return membership_.living({worker}).empty(); },
           .is_awaited = [this](
                             CallId call,
                             const Link& link) { return calls_.awaits(call, link.peer().id, link.incarnation()); },
           .on_inspect = [this](const auto& link, Frame frame) { onInspect(link, std::move(frame)); },
           .on_lost = [this](const Link& link, const Error& reason) { onLost(link, reason); },
           .on_activity =
               [this](const Link& link) {
                 liveness_.onActivity(link);
                 membership_.onActivity(link.peer(), link.incarnation());
               }}),
      liveness_(options_.self.id, options_.liveness, *timer_, connections_),
      reliable_(
          *timer_,
          {.send = [this](const auto& request) { attempt(request); },
           .resend =
               [this](const auto& request) {
                 // Between two attempts the call is not in the table.
                 if (calls_.contains(request.message.call)) sendWithFaults(request.to, request.message);
               }}),
      repeated_(
          *timer_,
          {.send = [this](const auto& call) { attemptCall(call); },
           .post_after = [this](Duration delay, auto task) { postAfter(delay, std::move(task)); },
           .incarnation = [this](WorkerId id) { return this->incarnation(id); },
           .worker = [this](WorkerId id) { return this->worker(id); },
           .next_random = options_.next_random ? options_.next_random : randomNumber}),
      keyed_(
          {.self = options_.self.name, .incarnation = options_.incarnation, .window = options_.idempotency_window},
          *timer_),
      pool_(options_.executor ? options_.executor : makeThreadPool(options_, *transport_)),
      strand_(*pool_, options_.enter_strand),
      server_(
          {.self = directory_.self(),
           .node = number_,
           .incarnation = options_.incarnation,
           .pool = *pool_,
           .strand = strand_,
           .gate = *gate_,
           .cancelled = cancelled_,
           .keyed = keyed_,
           .is_group_function = [this](const Message& message) { return isGroupFunction(message); },
           .decode = [this](Frame frame, WorkerId from) { return decode(std::move(frame), from, nullptr); },
           .closing = [this] { return closing(); },
           .not_served =
               [this](const Message& message) {
                 if (late_reply_observer_) late_reply_observer_(message);
               }}),
      membership_(*pool_) {
  liveness_.addSource([this](std::set<WorkerId>& workers) {
    calls_.addOutstanding(workers);
    workers.erase(self().id);
  });
}

Agent::~Agent() { close(); }

void Agent::on(Kind kind, Where where, RequestHandler handler) { server_.on(kind, where, std::move(handler)); }

void Agent::onLoopFirst(Kind kind, LoopHandler handler) { server_.onLoopFirst(kind, std::move(handler)); }

void Agent::onWorkerLost(LostHandler handler) { lost_handlers_.push_back(std::move(handler)); }

void Agent::onWorkerJoined(JoinedHandler handler) { joined_handler_ = std::move(handler); }

void Agent::admit(WorkerRecord record, bool is_news) {
  const auto before = directory_.find(record.info.id);
  const auto worker = record.info;
  const auto incarnation = record.incarnation;
  directory_.add(std::move(record));
  reportJoined(worker, incarnation, before, is_news);
}

// Note [Restarted workers]
// A worker that is started again has the name and id of its earlier incarnation. A message of the later incarnation may
// arrive before the group has announced it here, because a third worker that knows it may have called it. So its HELLO,
// which is read before any other message, counts as the announcement. HELLO has no address, so this node cannot open a
// connection yet. From then on everything of the earlier incarnation is lost: its connections are closed, its messages
// are refused, and no message for it goes to the later incarnation. The tables of RRefs and contexts order incarnations
// themselves, because a message of the earlier one may still be on its way from the loop to them.
void Agent::onNewIncarnation(const Peer& peer) {
  const auto before = directory_.find(peer.info.id);
  directory_.restart(peer);
  reportJoined(peer.info, peer.incarnation, before, /*is_news=*/true);
}

void Agent::reportJoined(
    const WorkerInfo& worker, uint64_t incarnation, const std::optional<WorkerRecord>& before, bool is_news) {
  const bool is_restarted = before && before->incarnation < incarnation;
  // A worker repeats its announcement until it is answered. A receiver that was started again meanwhile knows the
  // worker from the store already. The announcement must not end what this incarnation of the worker holds here.
  if (before && !is_restarted) return;
  const bool is_same_worker = is_restarted && before->info == worker;  // and not one that takes the id of a lost one
  connections_.replaceLinks(
      worker, incarnation,
      is_same_worker ? replacedError(worker)
                     : Error(ErrorCode::kWorkerLost, toString(worker) + " has joined under this id", worker.name));
  liveness_.onReplaced(worker.id);  // also if another peer has claimed the id and has gone
  if (joined_handler_) joined_handler_(worker, incarnation);
  if (is_news) membership_.onJoined(worker, incarnation, is_same_worker);
}

bool Agent::isAdmitted(const Link& link) const {
  const auto known = directory_.find(link.peer().id);
  return known && known->info == link.peer() && known->incarnation == link.incarnation();
}

void Agent::watchMembers() {
  std::vector<WorkerId> others;
  for (const auto& worker : directory_.all()) {
    if (worker.id != self().id) others.push_back(worker.id);
  }
  liveness_.watch(others);
}

std::string Agent::listen() { return connections_.listen(); }

void Agent::post(std::function<void()> task) {
  Executor::Task posted(std::move(task));
  // The pool closes after the loop has ended. Then a task may run on any thread, so the calling thread runs it.
  // NOLINTNEXTLINE(bugprone-use-after-move): post() has moved it only if it returns true
  if (!pool_->post(std::move(posted))) posted();
}

void Agent::postToStrand(std::function<void()> task) {
  Executor::Task posted(std::move(task));
  // NOLINTNEXTLINE(bugprone-use-after-move): as in post()
  if (!strand_.post(std::move(posted))) posted();
}

void Agent::postAfter(Duration delay, std::function<void()> task) {
  timer_->after(delay, [this, task = std::move(task)]() mutable { pool_->post(std::move(task)); });
}

WorkerInfo Agent::worker(WorkerId id) const { return directory_.info(id); }

uint64_t Agent::incarnation(WorkerId id) const {
  return id == self().id ? options_.incarnation : directory_.incarnation(id);
}

bool Agent::anyAnswersPing(const std::vector<WorkerRecord>& workers) {
  const auto timeout = options_.liveness;
  return connections_.anyAnswersPing(workers, timeout == kNoLimit ? kPingTimeout : timeout);
}

void Agent::finish(const CallTable::Call& call, Result<Message> result) {
  if (refusesProgram() && beginsWork(call.kind)) {
    program_threads_.onCallEnded(call.thread, call.since, unansweredCount());
  }
  if (call.note.number != 0) observer_->onReply(call.note, result);
  call.handler(std::move(result));
}

void Agent::settle(const CallTable::Call& call, Result<Message>&& result) {
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

Messenger::ReplyHandler Agent::observed(WorkerId to, const Message& message, ReplyHandler handler) {
  const auto note = observer_ ? observer_->onRequest(to, message) : ReplyObserver::Note();
  if (note.number == 0) return handler;
  return [this, note, handler = std::move(handler)](Result<Message> result) {
    observer_->onReply(note, result);
    handler(std::move(result));
  };
}

Error Agent::closing() const {
  return {ErrorCode::kShutdown, "RPC is shutting down on " + self().name + ": the call was not completed", self().name};
}

Error Agent::forkedError() const {
  return {
      ErrorCode::kShutdown,
      "this process was forked from the one of " + self().name +
          ": calls, RRefs and contexts of that worker cannot be used here. To use RPC in this process, call init_rpc "
          "(C++: make a Node)",
      self().name};
}

// --- Requests sent by this worker ---

void Agent::request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) {
  if (!isInItsProcess()) return handler(forkedError());
  if (refusesOwn(message.kind)) return handler(refusal());
  if (message.repetition) return requestRepeatedly(to, std::move(message), timeout, std::move(handler));
  const auto note = observer_ ? observer_->onRequest(to, message) : ReplyObserver::Note();
  timeout = limitTimeout(message, timeout);
  message.call = calls_.nextId();
  start(to, message, timeout, std::move(handler), nullptr, note);
}

void Agent::start(
    WorkerId to, const Message& message, Duration timeout, ReplyHandler handler, Attempt* attempt,
    const ReplyObserver::Note& note) {
  const auto id = message.call;
  CallTable::Call call{
      .to = to, .timeout = timeout, .since = timer_->now(), .kind = message.kind, .bytes = bytesOf(message)};
  call.deadline = deadlineAfter(timeout, call.since);
  auto& record = ThreadRecord::ofThisThread();
  record.setLastCall(id);
  call.thread = record.thread();
  // Not requests of protocols between nodes, which must arrive.
  const auto operation = traitsOf(message.kind).operation;
  const bool is_for_caller = operation == Operation::kCall || operation == Operation::kFetch;
  const auto& served = currentCall();
  if (is_for_caller && served.node == number_ && served.ends_calls) call.made_for = served.id;
  call.token = ActivityToken(activity_);
  call.handler = std::move(handler);
  call.attempt = attempt;
  call.note = note;
  const auto kind = message.kind;  // the message may belong to a later attempt once the call is in the table
  std::shared_ptr<Link> link;
  Frame frame;
  if (to != self().id && !options_.faults && !closing_) {
    try {
      frame = encode(to, message);
      link = connections_.link(to);
    } catch (const Error& error) {
      return finish(call, error);
    }
    call.link = link->id();
    call.incarnation = link->incarnation();
  }
  const auto deadline = call.deadline;
  bool needs_timer = false;
  if (closing_ || !calls_.add(id, call, needs_timer)) {
    return finish(call, closing());
  }
  if (needs_timer) armTimer(deadline);
  liveness_.onRequest();
  if (link) return sendOver(*link, id, kind, std::move(frame));
  sendWithFaults(to, message);
}

void Agent::sendWithFaults(WorkerId to, const Message& message) {
  const auto id = message.call;
  const auto fault = options_.faults ? options_.faults(message) : SendFault();
  if (fault.fail) {
    failUnsent(id, {ErrorCode::kWorkerLost, "this fault was injected"});
  } else if (fault.delay > Duration::zero() && directory_.find(to)) {  // otherwise it fails now
    auto send_late = [this, to, id, incarnation = directory_.incarnation(to), message] {
      if (const auto replaced = checkIncarnation(to, incarnation)) return failUnsent(id, *replaced);
      send(to, id, message);
    };
    timer_->after(fault.delay, std::move(send_late));
  } else {
    send(to, id, message);
  }
}

Duration Agent::limitTimeout(Message& message, Duration timeout) const {
  const auto deadline = currentDeadline();
  // Messages of protocols between nodes must arrive, whatever the deadline of the program.
  if ((!options_.propagate_deadlines && deadline == kNever) || !carriesValues(message.kind)) return timeout;
  if (deadline != kNever) timeout = std::min(timeout, std::max<Duration>(deadline - timer_->now(), Duration(1)));
  if (timeout == kNoLimit) return timeout;
  message.headers.push_back({HeaderKind::kDeadline, deadlineHeader(timeout)});
  return timeout;
}

Status Agent::checkIncarnation(WorkerId worker, uint64_t incarnation) const {
  const auto latest = directory_.incarnation(worker);
  if (incarnation == 0 || latest <= incarnation) return std::nullopt;
  return replacedError(this->worker(worker));
}

void Agent::send(WorkerId to, CallId id, const Message& message) {
  try {
    if (to == self().id) {
      auto copy = encode(to, message);
      const auto call =
          std::make_shared<ServerCall>(*this, self(), FrameInfo{message.kind, id}, timer_->now(), nullptr);
      call->activity = ActivityToken(activity_);  // the call that is made may end before the function does
      return server_.serve(call, std::move(copy));
    }
    const auto kind = message.kind;  // the message may belong to a later attempt once the call has a link
    auto frame = encode(to, message);
    const auto link = connections_.link(to);
    calls_.assign(
        id, link->id(),
        link->incarnation());  // sent even if it has expired: RRefs in it have been forked to the callee
    sendOver(*link, id, kind, std::move(frame));
  } catch (const Error& e) {
    complete(id, e);
  }
}

Frame Agent::encode(WorkerId to, const Message& message) const try {
  return to == self().id ? encodeCopy(message, options_.limits) : encodeFrame(message, options_.limits);
} catch (const Error& error) {
  throw unsendableError(self().name, "a call to " + worker(to).name, error);
}

void Agent::sendOver(Link& link, CallId id, Kind kind, Frame frame) {
  const auto done = [this, id](const Status& failure) {
    if (failure) failUnsent(id, *failure);
  };
  // Other requests are small, or belong to protocols between nodes that must not wait.
  if (isCall(kind)) return link.sendCall(id, std::move(frame), done);
  link.send(std::move(frame), done);
}

void Agent::failUnsent(CallId id, const Error& reason) {
  if (auto call = calls_.take(id)) finish(*call, unsentError(worker(call->to), reason));
}

void Agent::complete(CallId id, Result<Message> result) {
  if (const auto call = calls_.take(id)) return settle(*call, std::move(result));
  onLateReply(result);
}

// Call ids are consecutive numbers, so any member can guess them: a reply counts only if it comes from the worker to
// which the call was sent. Resources in foreign replies are not released, because they belong to their sender.
void Agent::onReply(const Link& link, CallId id, Frame frame) {
  auto result = decode(std::move(frame), link.peer().id, &link);
  bool is_foreign = false;
  if (const auto call = calls_.takeFor(id, link.peer().id, link.incarnation(), is_foreign)) {
    return settle(*call, std::move(result));
  }
  if (!is_foreign) return onLateReply(result);
  foreign_replies_.fetch_add(1, std::memory_order_relaxed);
}

void Agent::onLateReply(const Result<Message>& result) {
  late_replies_.fetch_add(1, std::memory_order_relaxed);
  if (result && late_reply_observer_) late_reply_observer_(result.value());
}

void Agent::armTimer(TimePoint deadline) {
  timer_->at(deadline, [this] { expire(); });
}

void Agent::expire() {
  TimePoint next;
  auto expired = calls_.takeExpired(timer_->now(), next);
  if (next != kNever) armTimer(next);
  for (auto& call : expired) {
    const auto timeout = call.attempt ? call.attempt->timeout : call.timeout;
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
    const auto to = worker(call.to);
    const Error error(
        ErrorCode::kTimeout,
        "RPC ran for more than set timeout (" + std::to_string(ms) +
            " ms) and will now be marked with an error: " + to.name +
            " has not replied. Pass a longer timeout to the call, or a longer default to the worker (in Python "
            "rpc_timeout of its options, in C++ NodeOptions::timeout)" +
            threadShortage(call.timeout),
        to.name);
    finish(call, error);
    // An attempt of a call that may be repeated is not cancelled: a later one may need its result.
    const bool runs_call = traitsOf(call.kind).operation == Operation::kCall && !call.attempt;
    if (runs_call) notifyCallee(call, options_.cancel_on_timeout ? CancelKind::kStop : CancelKind::kAbandon);
  }
}

std::string Agent::threadShortage(Duration timeout) const {
  const auto pool = pool_->stats();
  // The first calls that time out free threads. So for later ones, at_limit shows that threads were short.
  if (pool.lacking == 0 && pool.at_limit < std::chrono::steady_clock::now() - timeout) return {};
  return ". During the call " + self().name +
      " had as many threads as it can have, which this call may have needed: of " + std::to_string(pool.threads) +
      " threads " + std::to_string(pool.blocked) + " are blocked in calls of their own, and " +
      std::to_string(pool.queued + strand_.queued()) + " tasks wait for a thread. Nest fewer calls";
}

// --- Cancelled calls ---

// Note [Cancelled calls]
// A caller that cancels a call ends it on its own side at once, and sends CANCEL behind the request; so does a caller
// whose call has timed out. CANCEL says whether the call is to end, or is only abandoned: without cancel_on_timeout a
// function goes on after a time-out, but nobody has to wait for a future that it has returned. A call that has not
// begun when CANCEL arrives does not run, unless it is abandoned. For one that runs, CANCEL ends the calls that it has
// made and waits for, and it ends coroutines; a plain function ends sooner only if it checks. It is a hint: the callee
// may have answered already. So the protocols above do not depend on it: the reply counts as a late one, whose RRefs
// are released. The callee has no table of the calls that it serves. It makes an entry when CANCEL arrives, or when a
// function registers a handler, and removes it with the answer. (CANCEL that arrives after the answer is dropped,
// unless other calls of that caller are unanswered: then its entry stays until the link ends or many other entries have
// been added.)

bool Agent::cancel(CallId id) {
  if (!isInItsProcess()) return false;
  const auto call = calls_.take(id);
  if (!call) return false;
  const auto to = worker(call->to);
  finish(*call, Error(ErrorCode::kCancelled, "the call to " + to.name + " was cancelled by its caller", to.name));
  notifyCallee(*call, CancelKind::kStop);
  return true;
}

void Agent::notifyCallee(const CallTable::Call& call, CancelKind kind) {
  if (call.to == self().id) return cancelServed({0, call.id}, kind);
  for (const auto& link : connections_.links()) {
    if (link->id() != call.link) continue;
    std::string payload;
    Writer writer(payload);
    writer.put(call.id);
    writer.put(kind);
    // Sent as a call, so that it does not overtake a call that is held back.
    link->sendCall(
        calls_.nextId(), encodeFrame({.kind = Kind::kCancel, .payload = std::move(payload)}), [](const Status&) {});
  }
}

void Agent::cancelServed(const ServedId& id, CancelKind kind) {
  if (kind == CancelKind::kAbandon) return cancelled_.cancel(id, kind);
  const auto made = calls_.madeFor(id);  // before the function is told: it may make calls to clean up
  cancelled_.cancel(id);
  for (const auto call : made) cancel(call);
}

void Agent::onCancel(Link& link, Frame frame) try {
  const auto message = decodeFrame(std::move(frame), options_.limits);
  Reader reader(message.payload);
  const auto id = reader.get<CallId>();
  const auto kind = reader.get<uint8_t>();
  reader.expectEnd();
  if (kind > static_cast<uint8_t>(CancelKind::kAbandon)) throw Error(ErrorCode::kProtocol, "an unknown kind of CANCEL");
  if (id != 0 && link.hasUnanswered()) cancelServed({link.id(), id}, static_cast<CancelKind>(kind));
} catch (const Error& error) {
  onMalformed(link, Kind::kCancel, error);
}

bool Agent::isCancelled(const ServedId& id) const {
  if (id.call == 0) return false;
  if (cancelled_.isCancelled(id)) return true;
  return id.link != 0 && !connections_.isOpen(id.link);
}

bool Agent::onCancelled(const ServedId& id, CancelledCalls::Handler handler, CancelKind kind) {
  if (!cancelled_.onCancelled(id, std::move(handler), kind)) return false;
  if (id.link != 0 && !connections_.isOpen(id.link)) cancelled_.loseLink(id.link);
  return true;
}

// --- Calls that may be repeated ---

void Agent::requestRepeatedly(WorkerId to, Message message, Duration timeout, ReplyHandler handler) {
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
  call->deadline = deadlineAfter(timeout, timer_->now());
  call->has_deadline_header = message.header(HeaderKind::kDeadline) != nullptr;
  if (!repetition->key.empty()) call->digest = digestOf(message);
  call->repetition = repetition;
  call->token = ActivityToken(activity_);
  call->handler = observed(to, message, std::move(handler));
  call->message = std::move(message);
  repeated_.add(call);
}

void Agent::attemptCall(const RepeatedCalls::CallPtr& call) {
  auto& message = call->message;
  const bool after_restart = call->repetition->policy.after_restart;
  const RepeatableHeader header{
      .key = call->repetition->key,
      .number = call->number,
      .oldest = call->number == 0 ? 0 : repeated_.oldestNumber(call->to),
      .incarnation = after_restart ? 0 : call->may_have_run_on,
      .digest = call->digest,
      .attempt = call->attempts};
  message.setHeader(HeaderKind::kRepeatable, header.encode());
  auto timeout = call->timeout;
  if (call->deadline != kNever) timeout = std::max<Duration>(call->deadline - timer_->now(), Duration(1));
  if (call->has_deadline_header) message.setHeader(HeaderKind::kDeadline, deadlineHeader(timeout));
  message.call = calls_.nextId();
  // An answer of this worker to itself is no loss, whatever its error.
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

void Agent::requestReliably(WorkerId to, Message message, ReplyHandler handler) {
  if (!isInItsProcess()) return handler(forkedError());
  TORCH_INTERNAL_ASSERT(isReliable(message.kind), "not an idempotent kind: ", name(message.kind));
  auto observed_handler = observed(to, message, std::move(handler));
  message.call = calls_.nextId();
  reliable_.add(std::make_shared<ReliableRequests::Request>(
      to, directory_.incarnation(to), std::move(message), Responder(std::move(observed_handler)),
      ActivityToken(activity_)));
}

void Agent::attempt(const ReliableRequests::RequestPtr& request) {
  if (const auto replaced = checkIncarnation(request->to, request->incarnation)) {
    // is_lost is false, because waiting requests may have been made for the later incarnation.
    return reliable_.finish(request, lostError(worker(request->to), *replaced), /*is_lost=*/false);
  }
  if (liveness_.isSilent(request->to)) {
    const auto to = worker(request->to);
    const auto error = lostError(to, {ErrorCode::kWorkerLost, to.name + " is silent", to.name});
    return reliable_.finish(request, error, /*is_lost=*/true);
  }
  start(request->to, request->message, kNoLimit, [this, request](Result<Message> result) {
    const auto code = result ? ErrorCode::kUnknown : result.error().code();
    const bool is_lost = code == ErrorCode::kWorkerLost;
    if (is_lost) ++request->lost_attempts;
    // A time-out is an answer of the peer, because this side has set none.
    const bool may_retry = code == ErrorCode::kTimeout || (is_lost && request->lost_attempts < kMaxLostAttempts);
    if (result || !may_retry || closing_) {
      // The peer may also answer that another worker is lost.
      const bool is_unreachable = is_lost && result.error().worker() == worker(request->to).name;
      return reliable_.finish(request, std::move(result), is_unreachable);
    }
    const auto next_pause = std::min<Duration>(request->pause * 2, kLongestPause);
    const auto pause = std::exchange(request->pause, next_pause);
    timer_->after(pause, [this, request] { attempt(request); });  // may already run on the timer's thread
  });
}

// --- Frames that arrive ---

void Agent::onMalformed(const Link& link, std::optional<Kind> kind, const Error& error) {
  malformed_.fetch_add(1, std::memory_order_relaxed);
  connections_.recordRefusal(link.nameForAudit(), error, kind ? name(*kind) : "UNKNOWN");
}

Result<Message> Agent::decode(Frame frame, WorkerId from, const Link* link) {
  if (frame.failure) return *frame.failure;
  const auto info = options_.audit_log ? peekFrame(frame.head) : std::nullopt;  // for the line of a malformed message
  try {
    if (options_.copies_shared_tensors) copySharedSegments(frame);
    Result<Message> message(decodeFrame(std::move(frame), options_.limits));
    message.value().from = from;
    return message;
  } catch (const Error& e) {
    if (link) {
      onMalformed(*link, info ? std::optional(info->kind) : std::nullopt, e);
    } else {
      malformed_.fetch_add(1, std::memory_order_relaxed);
    }
    return e;
  }
}

void Agent::onFrame(const std::shared_ptr<Link>& link, Frame frame) {
  auto bytes_token = link->takeAnnouncedToken();
  const auto info = peekFrame(frame.head);
  if (info && info->kind == Kind::kPing) return link->sendPong();
  if (info && info->kind == Kind::kPong) return;
  if (info && info->kind == Kind::kStarted) return onStarted(*link, std::move(frame));
  if (info && info->kind == Kind::kCancel) return onCancel(*link, std::move(frame));
  if (info && info->kind == Kind::kGoodbye) {
    const auto& name = link->peer().name;
    if (!closing_ && !leaving_ && isAdmitted(*link)) membership_.onLeft(link->peer(), link->incarnation());
    return link->close({ErrorCode::kWorkerLost, name + " has shut down", name});
  }
  const auto role = info ? roleOf(info->kind) : std::nullopt;
  if (!role || *role == Role::kOneWay) {
    const Error error(ErrorCode::kProtocol, "a message of a kind that is not expected here");
    return onMalformed(*link, info ? std::optional(info->kind) : std::nullopt, error);
  }
  if (*role == Role::kReply) {
    onReply(*link, info->call, std::move(frame));
    return link->onAnswered(info->call);
  }
  if (link->replyQueue().isOverrun()) {
    const auto& name = link->peer().name;
    return link->cutOff({ErrorCode::kProtocol, name + " does not read the replies to its requests", name});
  }
  liveness_.onRequest();  // it may make its sender a holder of RRefs, and liveness watches holders
  const auto call = std::make_shared<ServerCall>(*this, link->peer(), *info, timer_->now(), link);
  call->is_counted = isCounted(info->kind);
  call->call_bytes = isCall(info->kind) ? bytesOf(frame) : 0;
  call->is_from_member = link->isMember();
  call->activity = ActivityToken(activity_);
  if (call->is_counted) link->addUnanswered();
  call->is_program_timed = call->is_counted && refusesProgram();
  if (call->is_program_timed) program_threads_.onArrived(call->arrived);
  Status over_quota;
  if (frame.failure && frame.failure->code() == ErrorCode::kQuotaExceeded) over_quota = *frame.failure;
  if (call->is_counted && !over_quota && (link->usage() || (quotas_.limitsCalls() && isCall(info->kind)))) {
    try {
      takeQuota(*call, bytesOf(frame), std::move(bytes_token));
    } catch (const Error& error) {
      over_quota = error;
    }
  }
  const bool is_refused = over_quota || (isForMembers(info->kind) && !link->isMember());
  if (options_.audit_log && (call->is_counted || is_refused)) {
    call->audit = std::make_shared<AuditedCall>(link->nameForAudit(link->peer().name), info->kind, bytesOf(frame));
  }
  const Responder responder(call);
  if (call->is_counted && ending_.hasBegun()) {
    link->requireReader();
    // The header says that the call has not begun: it may be sent again to a worker that is started in this one's
    // place.
    auto refusal = encodeError(endingError());
    refusal.headers.push_back({HeaderKind::kRepeatable, {}});
    return responder.reply(std::move(refusal));
  }
  if (over_quota) {
    refused_by_quota_.fetch_add(1, std::memory_order_relaxed);
    return responder.fail(*std::move(over_quota));
  }
  // Reports do not wait in line, as calls do, until the peer has read its replies.
  if (info->kind == Kind::kInspect && link->replyQueue().shouldDefer()) {
    const auto& name = link->peer().name;
    return responder.fail(
        Error(ErrorCode::kQuotaExceeded, name + " has not read the replies to its earlier requests", self().name));
  }
  link->startedCalls().onArrived(call->call_bytes);
  server_.serve(call, std::move(frame));
}

void Agent::takeQuota(ServerCall& call, size_t bytes, CallerUsage::Token bytes_token) {
  if (const auto& error = call.link->refusal()) throw *error;
  if (const auto& usage = call.link->usage()) {
    call.quota_token = usage->takeCall(bytes, std::move(bytes_token));
    if (traitsOf(call.kind).operation == Operation::kRemote) call.rref_quota_token = usage->takeRRef();
  }
  if (!quotas_.limitsCalls() || !isCall(call.kind)) return;
  using Both = std::pair<CallerUsage::Token, CallerUsage::Token>;
  call.quota_token = std::make_shared<Both>(std::move(call.quota_token), quotas_.takeCall());
}

void Agent::answer(ServerCall& call, Result<Message> result) {
  const auto activity = std::move(call.activity);
  call.quota_token.reset();  // before the caller can have the answer and make another call
  if (!call.link) {
    cancelled_.onAnswered({0, call.id});
    try {
      result = result ? Result<Message>(copyMessage(result.value())) : namedError(result.error(), self().name);
    } catch (const Error& error) {
      result = unsendableError(self().name, "the result to itself", error).withOrigin(ErrorOrigin::kResult);
    }
    return complete(call.id, std::move(result));
  }
  if (call.audit) {
    recordServed(*call.audit, result);
  } else if (options_.audit_log && !result) {
    connections_.recordRefusal(call.link->nameForAudit(), result.error(), name(call.kind));
  }
  reply(call, std::move(result), activity);
  if (call.is_counted) call.link->removeUnanswered();
  if (call.is_program_timed) program_threads_.onAnswered(call.arrived);
  cancelled_.onAnswered({call.link->id(), call.id});
  ending_.notify();
}

void Agent::recordServed(AuditedCall& call, const Result<Message>& result) {
  if (result && result.value().kind == Kind::kError) {
    const auto error = decodeError(result.value());
    return options_.audit_log->record(call.finish(&error, 0));
  }
  options_.audit_log->record(result ? call.finish(nullptr, bytesOf(result.value())) : call.finish(&result.error(), 0));
}

void Agent::onStarted(Link& link, Frame frame) try {
  link.onStarted(StartReport::decode(decodeFrame(std::move(frame), options_.limits).payload));
} catch (const Error& error) {
  onMalformed(link, Kind::kStarted, error);
}

void Agent::onInspect(const std::shared_ptr<Link>& link, Frame frame) {
  const auto name = link->provedName();
  if (link->replyQueue().shouldDefer() || link->replyQueue().isOverrun()) {
    return link->cutOff({ErrorCode::kProtocol, "an observer does not read the reports for which it asks", name});
  }
  const WorkerInfo observer{name.empty() ? "an observer" : name, kNoWorker};
  const auto call = std::make_shared<ServerCall>(*this, observer, *peekFrame(frame.head), timer_->now(), link);
  if (link->mayInspect()) return server_.serve(call, std::move(frame));
  Responder(call).fail(Error(
      ErrorCode::kNotAllowed,
      self().name + " does not let " + name + " inspect it: give it an identity with the role observer", self().name));
}

void Agent::reply(const ServerCall& call, Result<Message> result, const ActivityToken& activity) {
  if (!isInItsProcess()) return;  // the function has forked, and this is the child
  const auto& link = call.link;
  auto message = result ? std::move(result).value() : encodeError(namedError(result.error(), self().name));
  message.call = call.id;
  Frame frame;
  try {
    frame = encodeFrame(message, options_.limits);
  } catch (const Error& e) {
    if (unsent_reply_observer_) unsent_reply_observer_(message);
    const auto unsendable = unsendableError(self().name, "the result to " + call.from.name, e);
    message = encodeError(unsendable.withOrigin(ErrorOrigin::kResult));
    message.call = call.id;
    frame = encodeFrame(message, options_.limits);
  }
  link->startedCalls().onAnswered(call.id);
  const auto bytes = bytesOf(frame);
  link->replyQueue().onReply(bytes);
  // The link may belong to an earlier incarnation of the caller: then this fails although the worker itself is not
  // lost.
  link->send(
      std::move(frame),
      [this, link, bytes, token = activity, kind = message.kind,
       headers = std::move(message.headers)](const Status& failure) {
        link->replyQueue().onReplySent(bytes);
        if (failure && unsent_reply_observer_) unsent_reply_observer_({.kind = kind, .headers = headers});
      });
}

void Agent::onLost(const Link& link, const Error& reason) {
  const auto& peer = link.peer();
  ending_.notify();
  cancelled_.loseLink(link.id());
  for (auto& call : calls_.takeLink(link.id())) {
    if (call.attempt) call.attempt->sent_to = call.incarnation;
    finish(call, lostError(peer, reason));
  }
  const bool is_admitted = isAdmitted(link);
  // Whether a later incarnation, or another worker with this id, has joined.
  const bool is_replaced = !is_admitted && directory_.find(peer.id);
  liveness_.onClosed(link, is_replaced);
  if (is_replaced || closing_ || leaving_) return;
  if (is_admitted) membership_.onLost(peer, link.incarnation());
  for (const auto& handler : lost_handlers_) handler(peer);
}

// --- Shutdown ---

// Note [The end of a node]
// A node that ends refuses new calls, its own included, and gives the calls that it serves some time to answer. After
// the last reply it sends GOODBYE on each connection. The peer closes the connection when it has read GOODBYE, and only
// then does this side close it. A socket that is closed while bytes arrive is reset, and a reset destroys replies that
// the peer has not read. The node does not wait for peers to which it has answered nothing since the end began and for
// which nothing is queued. Functions that have not answered in time go on; close() waits for them.

bool Agent::refusesOwn(Kind kind) const {
  const bool has_begun = ending_.hasBegun();
  const auto ending_thread = ending_thread_.load();
  if (!beginsWork(kind) || (!has_begun && (ending_thread == 0 || ending_thread == os::threadId()))) return false;
  // A function that this node serves may need calls of its own to answer, which may come from threads that it has
  // started. So until all workers end, threads may call while a function is served. Those that call for the program are
  // refused when a call of theirs has shown it. Otherwise the threads of two workers could keep each other's workers
  // serving, and so themselves allowed, without an end.
  return !isOnOwnThread() && (has_begun || unansweredCount() == 0 || program_threads_.contains(os::threadId()));
}

size_t Agent::unansweredCount() const {
  size_t count = 0;
  for (const auto& link : connections_.allLinks()) count += link->unansweredCount();
  return count;
}

Error Agent::refusal() const {
  return {ErrorCode::kShutdown, self().name + " is shutting down and makes no new calls", self().name};
}

void Agent::requireCallsAllowed() const {
  if (isClosing() || refusesOwn(Kind::kPythonCall)) throw refusal();
}

void Agent::refuseOwnCalls() { ending_thread_ = os::threadId(); }

Error Agent::endingError() const {
  return {ErrorCode::kShutdown, self().name + " is shutting down and accepts no more calls", self().name};
}

bool Agent::takeStep(Step step) {
  MutexLock lock(mutex_);
  if (step_ >= step) return false;
  step_ = step;
  return true;
}

void Agent::beginEnd(Duration limit, Duration grace) {
  ending_.begin(limit, grace);
  gate_->openForGood();
  for (const auto& link : connections_.allLinks()) {
    if (link->hasUnanswered()) link->requireReader();
  }
}

bool Agent::drain(Duration timeout) {
  beginEnd(kNoLimit);
  const auto is_answered = [this] {
    return std::ranges::none_of(connections_.allLinks(), [this](const auto& link) {
      return link->hasUnanswered() || (is_reader_ && !link->isClosed() && is_reader_(link->peer().id));
    });
  };
  return ending_.awaitAnswers(is_answered, deadlineAfter(timeout));
}

void Agent::sayGoodbye() {
  closing_ = true;
  liveness_.close();
  for (auto& call : calls_.close()) finish(call, closing());
  reliable_.close(closing());
  repeated_.close(closing());
  auto links = std::make_shared<const Links>(connections_.allLinks());
  for (const auto& link : *links) link->sendGoodbye([this] { ending_.notify(); });
  {
    MutexLock lock(mutex_);
    left_links_ = std::move(links);
  }
  ending_.notify();
}

bool Agent::leave(Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  if (!drain(timeout)) return false;
  if (takeStep(Step::kLeaving)) sayGoodbye();
  const auto links = [this] {
    MutexLock lock(mutex_);
    return left_links_;
  };
  const auto is_read = [&links] {
    const auto left = links();
    return left && std::ranges::all_of(*left, [](const auto& link) { return link->isLeft(); });
  };
  const auto progress = [&links] {
    uint64_t sum = 0;
    if (const auto left = links()) {
      for (const auto& link : *left) sum += link->progress();
    }
    return sum;
  };
  return ending_.awaitReaders(is_read, progress, deadline);
}

bool Agent::close(Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  if (!leave(timeout)) return false;
  if (takeStep(Step::kClosed)) {
    timer_->close();
    transport_->close();
  }
  const bool has_ended = lent_threads_->close(timeUntil(deadline));
  const bool is_closed = pool_->close(timeUntil(deadline)) && has_ended;
  if (options_.audit_log) options_.audit_log->flush(kAuditFlushTime);
  return is_closed;
}

std::vector<ThreadRecord::Snapshot> Agent::threadRecords() const {
  auto records = ThreadRecord::all();
  for (auto& record : records) {
    std::erase_if(record.served, [this](const ServedCall& call) { return call.node != number_; });
  }
  return records;
}

std::vector<Agent::ConnectionRow> Agent::connectionRows() const {
  std::vector<ConnectionRow> rows;
  for (const auto& link : connections_.allLinks()) {
    if (link->isClosed()) continue;
    rows.push_back(
        {.peer = link->peer(),
         .how = link->describe(),
         .held_calls = link->heldCount(),
         .queued_reply_bytes = link->replyQueue().queuedBytes(),
         .has_unanswered = link->hasUnanswered()});
  }
  return rows;
}

Agent::Counts Agent::counts() const {
  const auto pool = pool_->stats();
  return {
      .pending_calls = calls_.size(),
      .connections = connections_.size(),
      .pool = pool,
      .queued_tasks = pool.queued + strand_.queued(),
      .queued = connections_.queued(),
      .keyed = keyed_.counts(),
      .retries = repeated_.retries(),
      .refused_by_quota = refused_by_quota_.load(),
      .late_replies = late_replies_.load(),
      .foreign_replies = foreign_replies_.load(),
      .malformed_frames = malformed_.load()};
}

std::map<std::string, std::string> Agent::metrics() const {
  const auto counts = this->counts();
  const auto& pool = counts.pool;
  const auto& queued = counts.queued;
  std::map<std::string, std::string> metrics = {
      {"agent.num_pending_calls", std::to_string(counts.pending_calls)},
      {"agent.num_connections", std::to_string(counts.connections)},
      {"agent.late_replies", std::to_string(counts.late_replies)},
      {"agent.foreign_replies", std::to_string(counts.foreign_replies)},
      {"agent.malformed_frames", std::to_string(counts.malformed_frames)},
      {"agent.thread_pool_size", std::to_string(options_.threads)},
      {"agent.num_threads", std::to_string(pool.threads)},
      {"agent.num_idle_threads", std::to_string(pool.idle)},
      {"agent.num_blocked_threads", std::to_string(pool.blocked)},
      {"agent.num_lacking_threads", std::to_string(pool.lacking)},
      {"agent.num_deferred_calls", std::to_string(queued.deferred_calls)},
      {"agent.num_held_calls", std::to_string(queued.held_calls)},
      {"agent.queued_reply_bytes", std::to_string(queued.reply_bytes)},
      {"agent.num_queued_tasks", std::to_string(counts.queued_tasks)},
      {"agent.transport", transport_->describe()},
  };
  metrics["agent.num_keyed_calls"] = std::to_string(counts.keyed.calls);
  metrics["agent.kept_reply_bytes"] = std::to_string(counts.keyed.reply_bytes);
  metrics["agent.repeated_calls"] = std::to_string(counts.keyed.repeats);
  metrics["agent.retries"] = std::to_string(counts.retries);
  if (!quotas_.empty()) metrics["agent.refused_by_quota"] = std::to_string(counts.refused_by_quota);
  if (options_.audit_log) metrics["agent.dropped_audit_events"] = std::to_string(options_.audit_log->dropped());
  metrics.merge(transport_->metrics());
  return metrics;
}

}  // namespace torchrpc
