#include "agent/agent.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "base/exception.h"
#include "base/os/threads.h"
#include "base/random.h"
#include "calls/current_call.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

/// The time for the audit log to be written when the node has ended.
constexpr Duration kAuditFlushTime = std::chrono::seconds(5);

/// The time-out of a worker's answer to a ping if liveness has no limit.
constexpr Duration kPingTimeout = std::chrono::seconds(30);

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

uint64_t nextNodeNumber() {
  static std::atomic<uint64_t> number{0};
  return ++number;
}

}  // namespace

Agent::Agent(Options options, std::unique_ptr<Transport> transport, std::shared_ptr<Timer> timer)
    : options_(std::move(options)),
      number_(nextNodeNumber()),
      directory_({options_.self, options_.incarnation}),
      timer_(std::move(timer)),
      transport_(std::move(transport)),
      quotas_(options_.self.name, options_.quotas, options_.max_calls),
      connections_(
          *transport_, directory_,
          {.world_size = options_.world_size,
           .max_queued_bytes = options_.max_queued_bytes,
           .quotas = quotas_.empty() ? nullptr : &quotas_,
           .audit_log = options_.audit_log},
          {.on_restarted = [this](const Peer& peer) { onRestarted(peer); },
           .on_frame = [this](const auto& link, Frame frame) { onFrame(link, std::move(frame)); },
           .is_lost = [this](const WorkerInfo& worker) { return membership_.living({worker}).empty(); },
           .is_awaited = [this](CallId call, const Link& link) { return made_.awaits(call, link); },
           .on_inspect = [this](const auto& link, Frame frame) { served_.inspect(link, std::move(frame)); },
           .on_lost = [this](const Link& link, const Error& reason) { onLost(link, reason); },
           .on_activity =
               [this](const Link& link) {
                 liveness_.onActivity(link);
                 membership_.onActivity(link.peer());
               }}),
      liveness_(options_.self.id, options_.liveness, *timer_, connections_),
      made_(
          {.limits = options_.limits,
           .propagate_deadlines = options_.propagate_deadlines,
           .cancel_on_timeout = options_.cancel_on_timeout,
           .faults = options_.faults,
           .next_random = options_.next_random ? options_.next_random : randomNumber},
          {.node = number_,
           .timer = *timer_,
           .directory = directory_,
           .connections = connections_,
           .liveness = liveness_,
           .activity = activity_,
           .serve_own = [this](const FrameInfo& info, Frame frame) { served_.serveOwn(info, std::move(frame)); },
           .cancel_own = [this](CallId id, CancelKind kind) { cancelServed({0, id}, kind); },
           .discard = [this](const Message& message) { discard(message); },
           .on_ended =
               [this](const ClientCall& call) {
                 if (beginsWork(call.kind)) program_threads_.onCallEnded(call.thread, call.since, unansweredCount());
               },
           .thread_shortage = [this](Duration timeout) { return threadShortage(timeout); },
           .post_after = [this](Duration delay, auto task) { postAfter(delay, std::move(task)); }}),
      keyed_(
          {.self = options_.self.name, .incarnation = options_.incarnation, .window = options_.idempotency_window},
          *timer_),
      pool_(options_.executor ? options_.executor : makeThreadPool(options_, *transport_)),
      strand_(*pool_, options_.enter_strand),
      served_(
          {.maker = maker_,
           .self = directory_.self(),
           .limits = options_.limits,
           .timer = *timer_,
           .connections = connections_,
           .quotas = quotas_,
           .audit_log = options_.audit_log.get(),
           .activity = activity_,
           .ending = ending_,
           .program_threads = program_threads_,
           .cancelled = cancelled_,
           .complete_own = [this](CallId id, Result<Message> result) { made_.complete(id, std::move(result)); }},
          {.self = directory_.self(),
           .node = number_,
           .pool = *pool_,
           .strand = strand_,
           .gate = *gate_,
           .cancelled = cancelled_,
           .keyed = keyed_,
           .is_group_function = [this](const Message& message) { return isGroupFunction(message); },
           .decode = [this](Frame frame, WorkerId from) { return decode(std::move(frame), from, nullptr); },
           .closing = [this] { return made_.closing(); },
           .not_served = [this](const Message& message) { discard(message); }}),
      membership_(*pool_) {
  liveness_.addSource([this](std::set<WorkerId>& workers) {
    made_.table().addOutstanding(workers);
    workers.erase(self().id);
  });
}

Agent::~Agent() { close(); }

void Agent::on(Kind kind, Where where, RequestHandler handler) {
  served_.handlers().on(kind, where, std::move(handler));
}

void Agent::onLoopFirst(Kind kind, LoopHandler handler) { served_.handlers().onLoopFirst(kind, std::move(handler)); }

void Agent::onWorkerLost(LostHandler handler) { lost_handlers_.push_back(std::move(handler)); }

void Agent::onWorkerJoined(JoinedHandler handler) { joined_handler_ = std::move(handler); }

void Agent::admit(WorkerRecord record, bool is_news) {
  const auto before = directory_.find(record.info.id);
  const auto peer = record.peer();
  directory_.add(std::move(record));
  reportJoined(peer, before, is_news);
}

// Note [Restarted workers]
// A worker that is started again has the same name and id, and is another peer (PeerId). A message of the later peer
// may arrive before the group has announced it here, because a third worker that knows it may have called it. So its
// HELLO, which is read before any other message, counts as the announcement. HELLO has no address, so this node cannot
// open a connection yet. From then on everything of the earlier peer is lost: its connections are closed, its messages
// are refused, and no message for it goes to the later one. The tables of RRefs and contexts compare peers themselves,
// because a message of the earlier one may still be on its way from the loop to them.
void Agent::onRestarted(const Peer& peer) {
  const auto before = directory_.find(peer.id);
  directory_.restart(peer);
  reportJoined(peer, before, /*is_news=*/true);
}

void Agent::reportJoined(const Peer& peer, const std::optional<WorkerRecord>& before, bool is_news) {
  const bool is_restarted = before && before->peerId().isReplacedBy(peer.peerId());
  // A worker repeats its announcement until it is answered. A receiver that was started again meanwhile knows the
  // worker from the store already. The announcement must not end what this peer holds here.
  if (before && !is_restarted) return;
  const bool is_same_worker = is_restarted && before->info == peer;  // and not one that takes the id of a lost one
  connections_.replaceLinks(
      peer,
      is_same_worker ? replacedError(peer)
                     : Error(ErrorCode::kWorkerLost, toString(peer) + " has joined under this id", peer.name));
  liveness_.onReplaced(peer.id);  // also if another peer has claimed the id and has gone
  if (joined_handler_) joined_handler_(peer);
  if (is_news) membership_.onJoined(peer, is_same_worker);
}

bool Agent::isAdmitted(const Link& link) const {
  const auto known = directory_.find(link.peer().id);
  return known && known->isOf(link.peer());
}

void Agent::watchMembers() {
  std::vector<WorkerId> others;
  for (const auto& worker : directory_.all()) {
    if (worker.id != self().id) others.push_back(worker.id);
  }
  liveness_.watch(others);
}

std::string Agent::listen() { return connections_.listen(); }

void Agent::post(Task&& task) {
  // The pool closes after the loop has ended. Then a task may run on any thread, so the calling thread runs it.
  // NOLINTNEXTLINE(bugprone-use-after-move): post() has moved it only if it returns true
  if (!pool_->post(std::move(task))) task();
}

void Agent::postToStrand(Task&& task) {
  // NOLINTNEXTLINE(bugprone-use-after-move): as in post()
  if (!strand_.post(std::move(task))) task();
}

void Agent::postAfter(Duration delay, std::function<void()> task) {
  timer_->after(delay, [this, task = std::move(task)]() mutable { pool_->post(std::move(task)); });
}

WorkerInfo Agent::worker(WorkerId id) const { return directory_.info(id); }

bool Agent::anyAnswersPing(const std::vector<WorkerRecord>& workers) {
  const auto timeout = options_.liveness;
  return connections_.anyAnswersPing(workers, timeout == kNoLimit ? kPingTimeout : timeout);
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

void Agent::request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) {
  if (!isInItsProcess()) return handler(forkedError());
  if (refusesOwn(message.kind)) return handler(refusal());
  made_.request(to, std::move(message), timeout, std::move(handler));
}

void Agent::requestReliably(WorkerId to, Message&& message, ReplyHandler&& handler) {
  if (!isInItsProcess()) return handler(forkedError());
  made_.requestReliably(to, std::move(message), std::move(handler));
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

bool Agent::cancel(CallId id) { return isInItsProcess() && made_.cancel(id); }

void Agent::cancelServed(const ServedId& id, CancelKind kind) {
  if (kind == CancelKind::kAbandon) return cancelled_.cancel(id, kind);
  const auto made = made_.table().madeFor(id);  // before the function is told: it may make calls to clean up
  cancelled_.cancel(id);
  for (const auto call : made) cancel(call);
}

void Agent::onCancel(Link& link, Frame&& frame) try {
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

// --- Frames that arrive ---

void Agent::onMalformed(const Link& link, std::optional<Kind> kind, const Error& error) {
  malformed_.fetch_add(1, std::memory_order_relaxed);
  connections_.recordRefusal(link.nameForAudit(), error, kind ? name(*kind) : "UNKNOWN");
}

Result<Message> Agent::decode(Frame&& frame, WorkerId from, const Link* link) {
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

void Agent::onFrame(const std::shared_ptr<Link>& link, Frame&& frame) {
  auto bytes_token = link->takeAnnouncedToken();
  const auto info = peekFrame(frame.head);
  if (info && info->kind == Kind::kPing) return link->sendPong();
  if (info && info->kind == Kind::kPong) return;
  if (info && info->kind == Kind::kStarted) return onStarted(*link, std::move(frame));
  if (info && info->kind == Kind::kCancel) return onCancel(*link, std::move(frame));
  if (info && info->kind == Kind::kGoodbye) {
    const auto& name = link->peer().name;
    if (!closing_ && !leaving_ && isAdmitted(*link)) membership_.onLeft(link->peer());
    return link->close({ErrorCode::kWorkerLost, name + " has shut down", name});
  }
  const auto role = info ? roleOf(info->kind) : std::nullopt;
  if (!role || *role == Role::kOneWay) {
    const Error error(ErrorCode::kProtocol, "a message of a kind that is not expected here");
    return onMalformed(*link, info ? std::optional(info->kind) : std::nullopt, error);
  }
  if (*role == Role::kReply) {
    made_.onReply(*link, info->call, decode(std::move(frame), link->peer().id, link.get()));
    return link->onAnswered(info->call);
  }
  if (link->replyQueue().isOverrun()) {
    const auto& name = link->peer().name;
    return link->cutOff({ErrorCode::kProtocol, name + " does not read the replies to its requests", name});
  }
  liveness_.onRequest();  // it may make its sender a holder of RRefs, and liveness watches holders
  served_.serve(link, *info, std::move(frame), std::move(bytes_token));
}

void Agent::onStarted(Link& link, Frame&& frame) try {
  link.onStarted(StartReport::decode(decodeFrame(std::move(frame), options_.limits).payload));
} catch (const Error& error) {
  onMalformed(link, Kind::kStarted, error);
}

void Agent::onLost(const Link& link, const Error& reason) {
  const auto& peer = link.peer();
  ending_.notify();
  cancelled_.loseLink(link.id());
  made_.onLost(link, reason);
  const bool is_admitted = isAdmitted(link);
  // Whether a later start of the worker, or another worker with this id, has joined.
  const bool is_replaced = !is_admitted && directory_.find(peer.id);
  liveness_.onClosed(link, is_replaced);
  if (is_replaced || closing_ || leaving_) return;
  if (is_admitted) membership_.onLost(peer);
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

void Agent::refuseOwnCalls() {
  ending_thread_ = os::threadId();
  made_.reportEnds();
  served_.timeForProgram();
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
  made_.close();
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
      .pending_calls = made_.table().size(),
      .connections = connections_.size(),
      .pool = pool,
      .queued_tasks = pool.queued + strand_.queued(),
      .queued = connections_.queued(),
      .keyed = keyed_.counts(),
      .retries = made_.retries(),
      .refused_by_quota = served_.refusedByQuota(),
      .late_replies = made_.lateReplies(),
      .foreign_replies = made_.foreignReplies(),
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
