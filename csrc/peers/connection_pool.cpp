#include "peers/connection_pool.h"

#include <algorithm>

#include "base/log.h"
#include "base/sync/waiter.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {
/// Requests that are sent until they are answered are small. A larger one counts as other requests do.
constexpr uint64_t kMaxUncountedBytes = 1 << 20;

/// The error for a worker whose record has another role than the worker has proved.
Error falseRole(const WorkerInfo& peer) {
  return {
      ErrorCode::kProtocol, toString(peer) + " says in its record that it is a member, but has proved to be a client",
      peer.name};
}
}  // namespace

// --- Link ---

Error replacedError(const WorkerInfo& worker) {
  return {ErrorCode::kWorkerLost, worker.name + " has been started again", worker.name};
}

Link::Link(ConnectionPool& pool, uint64_t id, WorkerInfo peer, uint64_t incarnation)
    : pool_(pool),
      id_(id),
      is_inbound_(peer.id == kNoWorker),
      peer_(std::move(peer)),
      incarnation_(incarnation),
      started_calls_(pool.options_.max_queued_bytes, pool.senders_),
      reply_queue_(pool.options_.max_queued_bytes) {
  if (pool_.options_.quotas && peer_.id != kNoWorker) usage_ = pool_.options_.quotas->usageOf(peer_.name);
}

void Link::send(Frame frame, SentHandler done) {
  auto* connection = open_.load(std::memory_order_acquire);
  if (!connection) {
    MutexLock lock(mutex_);
    const auto closed = closed_ ? closed_ : close_reason_;
    if (!closed && !connection_) return waiting_.push_back({std::move(frame), std::move(done)});
    connection = connection_.get();
    lock.unlock();
    if (closed) return done(closed);
  }
  connection->send(std::move(frame), std::move(done));
}

void Link::sendCall(CallId call, Frame frame, SentHandler done) {
  const auto bytes = bytesOf(frame);
  if (!request_window_.concerns(bytes)) return send(std::move(frame), std::move(done));
  if (auto admitted = request_window_.admit({call, bytes, std::move(frame), std::move(done)})) {
    sendAdmitted(*std::move(admitted));
  }
}

void Link::sendAdmitted(RequestWindow::Call call) {
  send(std::move(call.frame), [self = shared_from_this(), id = call.id, done = std::move(call.done)](Status failure) {
    const bool failed = failure.has_value();
    done(std::move(failure));
    if (failed) self->onAnswered(id);
  });
}

void Link::sendHeld() {
  while (auto call = request_window_.takeHeld()) sendAdmitted(*std::move(call));
}

void Link::onAnswered(CallId call) {
  if (request_window_.release(call)) sendHeld();
}

void Link::onStarted(const StartReport& report) {
  if (request_window_.release(report)) sendHeld();
}

void Link::attach(const std::shared_ptr<Connection>& connection) {
  for (;;) {
    std::deque<Waiting> waiting;
    {
      MutexLock lock(mutex_);
      if (closed_) return;
      if (close_reason_) break;
      if (waiting_.empty()) {
        connection_ = connection;
        open_.store(connection.get(), std::memory_order_release);
        return;
      }
      waiting.swap(waiting_);
    }
    for (auto& each : waiting) connection->send(std::move(each.frame), std::move(each.done));
  }
  connection->close();  // which fails the frames that wait
}

void Link::close(Error reason) {
  std::shared_ptr<Connection> connection;
  CallerUsage::Token token;  // destroyed after the lock
  {
    MutexLock lock(mutex_);
    if (!close_reason_) close_reason_ = std::move(reason);
    open_ = nullptr;
    connection = connection_;
    token.swap(connection_token_);
  }
  if (connection) connection->close();
}

std::shared_ptr<Connection> Link::connection() {
  MutexLock lock(mutex_);
  return connection_;
}

uint64_t Link::progress() {
  const auto connection = this->connection();
  return connection ? connection->progress() : 0;
}

std::string Link::describe() {
  const auto connection = this->connection();
  return connection ? connection->describe() : "";
}

std::string Link::whyNotOpen() {
  const auto connection = this->connection();
  return connection ? connection->whyNotOpen() : "";
}

bool Link::isClosed() {
  MutexLock lock(mutex_);
  return closed_.has_value();
}

void Link::sendGoodbye(std::function<void()> sent) {
  if (reply_queue_.queuedBytes() > 0) requireReader();  // replies from before the end have to be read, too
  send(encodeFrame({.kind = Kind::kGoodbye}), [self = shared_from_this(), sent = std::move(sent)](const Status&) {
    self->is_goodbye_written_ = true;
    sent();
  });
}

bool Link::isLeft() {
  // A connection over which nothing has arrived may not be open yet.
  return !has_received_ || (is_goodbye_written_ && !requires_reader_) || isClosed();
}

bool Link::consumeActivity() {
  const auto now = progress();
  const bool moved = std::exchange(progress_, now) != now;
  return frame_arrived_.exchange(false, std::memory_order_relaxed) || moved;
}

void Link::onFrame(Frame frame) {
  if (is_refused_) return;
  if (peer_.id != kNoWorker) {
    if (!frame_arrived_.load(std::memory_order_relaxed)) {
      frame_arrived_.store(true, std::memory_order_relaxed);
      has_received_.store(true, std::memory_order_relaxed);
      pool_.events_.on_activity(*this);
    }
    pool_.events_.on_frame(shared_from_this(), std::move(frame));
    return;
  }
  try {
    onFirstFrame(std::move(frame));
  } catch (const Error& e) {
    static LogOnce once;
    once.log(LogLevel::kWarning, "a connection was refused: " + e.text());
    pool_.recordRefusal(e.worker().empty() ? nameForAudit() : nameForAudit(e.worker()), e);
    close(e);
  }
}

void Link::checkIdentity(const WorkerInfo& peer) const {
  if (identity_ && identity_->mayOnlyInspect()) {
    throw Error(
        ErrorCode::kProtocol, identity_->name + " has the role observer only: it may look at workers, but be none",
        identity_->name);
  }
  if (identity_ && identity_->name != peer.name) {
    throw Error(
        ErrorCode::kProtocol, "it says it is " + toString(peer) + ", but has proved to be worker " + identity_->name);
  }
  // Its connection was counted under the name of the handshake.
  if (!claimed_name_.empty() && claimed_name_ != peer.name) {
    throw Error(
        ErrorCode::kProtocol,
        "it says it is " + toString(peer) + ", but has said in the handshake that it is worker " + claimed_name_);
  }
}

void Link::sendPong() {
  if (is_pong_queued_.exchange(true)) return;
  send(encodeFrame({.kind = Kind::kPong}), [self = shared_from_this()](const Status&) {
    self->is_pong_queued_ = false;
  });
}

void Link::onIdentity(const PeerIdentity& identity) {
  identity_ = identity;
  if (peer_.id == kNoWorker) {
    countConnection(identity.name);
    return;
  }
  const auto record = pool_.directory_.find(peer_.id);
  if (!record || !record->is_member || identity.isMember()) return;
  is_refused_ = true;
  close(falseRole(peer_));
}

void Link::onClaimedName(const std::string& name) {
  claimed_name_ = name;
  countConnection(name);
}

// Counted before HELLO, because a peer may send PING and INSPECT without it.
void Link::countConnection(const std::string& name) {
  try {
    if (pool_.options_.quotas) pool_.takeQuota(*this, name);
  } catch (const Error& error) {
    is_refused_ = true;
    pool_.recordRefusal(nameForAudit(name), error);
    close(error);
  }
}

Status Link::onAnnounced(std::string_view head_begin, uint64_t bytes) {
  if (is_refused_) return Error(ErrorCode::kProtocol, "the connection is refused");
  const auto info = peekFrame(head_begin);
  if (peer_.id == kNoWorker) {
    is_refused_ = true;
    Error error(
        ErrorCode::kProtocol, "it began with a message of " + std::to_string(bytes) + " bytes, and not with HELLO");
    cutOff(error);
    return error;
  }
  if (!usage_) return std::nullopt;
  if (refusal_) return refusal_;
  // Replies are for calls of this worker, which does not count them. Members send their reliable requests until they
  // are answered, so a small one is not refused.
  if (info && roleOf(info->kind) == Role::kReply && pool_.events_.is_awaited(info->call, *this)) return std::nullopt;
  if (info && isReliable(info->kind) && isMember() && bytes <= kMaxUncountedBytes) return std::nullopt;
  try {
    announced_token_ = usage_->takeBytes(bytes);
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

void Link::cutOff(const Error& reason) {
  const auto name = nameForAudit();
  log(LogLevel::kWarning, "the connection of " + name + " is closed: " + reason.text());
  pool_.recordRefusal(name, reason, "disconnect");
  close(reason);
}

void Link::onFirstFrame(Frame frame) {
  const auto info = peekFrame(frame.head);
  if (info && info->kind == Kind::kPing) {
    sendPong();
  } else if (info && info->kind == Kind::kInspect) {
    pool_.events_.on_inspect(shared_from_this(), std::move(frame));
  } else {
    pool_.acceptHello(*this, std::move(frame));
  }
}

void Link::onClosed(const Error& ended) {
  Error reason = ended;
  bool has_broken_rules = false;  // of the transport's protocol, or limits
  std::deque<Waiting> waiting;
  CallerUsage::Token token;
  {
    MutexLock lock(mutex_);
    if (closed_) return;
    if (close_reason_) reason = *close_reason_;
    has_broken_rules = is_inbound_ && !close_reason_ &&
        (ended.code() == ErrorCode::kProtocol || ended.code() == ErrorCode::kFrameTooLarge);
    token.swap(connection_token_);
    closed_ = reason;
    waiting.swap(waiting_);
    open_ = nullptr;
  }
  announced_token_.reset();
  if (has_broken_rules) pool_.recordRefusal(nameForAudit(), ended, "disconnect");
  for (auto& each : waiting) each.done(reason);
  for (auto& each : request_window_.close()) each.done(reason);
  reply_queue_.close();
  pool_.remove(*this, reason);
}

// --- ConnectionPool ---

ConnectionPool::ConnectionPool(
    Transport& transport, const WorkerDirectory& directory, const Options& options, Events events)
    : transport_(transport), directory_(directory), options_(options), events_(std::move(events)) {}

std::string ConnectionPool::listen() {
  if (options_.audit_log) {
    transport_.onRefused(
        [this](const std::string& peer, const Error& reason) { recordRefusal(unprovedName(peer), reason); });
  }
  return transport_.listen([this](const std::shared_ptr<Connection>& connection) {
    auto link = std::make_shared<Link>(*this, next_link_++);
    link->attach(connection);
    return link;
  });
}

std::string ConnectionPool::hello() const {
  std::string payload;
  Writer writer(payload);
  writer.put(kProtocolVersion);
  writer.put(directory_.self().id);
  writer.putString(directory_.self().name);
  writer.put(options_.incarnation);
  return payload;
}

// Note [Workers that are not known yet]
// A worker that joins a group that grows calls the members before they know it, and a worker that was started again
// may call before its announcement has arrived. Such a worker claims its id and its incarnation, and in a group without
// identities its name, so HELLO gives it no rights: this node answers its requests, but sends no request to it. Only
// when the worker has been admitted, and the directory has its record, does this node send over a link with the name,
// the id and the incarnation in the record. All other links with that id are closed then. So a peer that claims the id
// of a worker that will join later, or any incarnation, neither gets the calls for that worker nor keeps it out.
// In a group that grows, the same holds for a worker of another name that claims the id of a lost worker.
void ConnectionPool::acceptHello(Link& link, Frame frame) {
  const auto message = decodeFrame(std::move(frame));
  if (message.kind != Kind::kHello) throw Error(ErrorCode::kProtocol, "it did not begin with HELLO");
  Reader reader(message.payload);
  if (const auto version = reader.get<uint32_t>(); version != kProtocolVersion) {
    throw Error(
        ErrorCode::kProtocol,
        "it speaks version " + std::to_string(version) + " of the protocol, this worker " +
            std::to_string(kProtocolVersion) + ": install the same torchrpc on all workers");
  }
  WorkerInfo peer;
  peer.id = reader.get<WorkerId>();
  peer.name = reader.getString();
  const auto incarnation = reader.get<uint64_t>();
  reader.expectEnd();
  // A HELLO may arrive before the announcement that its worker has joined, or has been started again.
  const auto known = directory_.find(peer.id);
  const bool is_expected = !known || (known->info == peer && known->incarnation == incarnation);
  const bool is_restarted = known && known->info == peer && known->incarnation < incarnation;
  const bool is_id_free = known && known->info != peer && options_.world_size == 0 && events_.is_lost(known->info);
  // State that belongs to an id outlives the connection, so ids are bounded in a group that grows, too.
  const auto places = options_.world_size > 0 ? options_.world_size : kMaxWorldSize;
  if (peer.id >= places) {
    throw Error(
        ErrorCode::kProtocol,
        "it says it is " + toString(peer) + ", but " + (options_.world_size > 0 ? "the" : "a growing") +
            " group has at most " + std::to_string(places) + " workers",
        peer.name);
  }
  if (peer.id < 0 || peer.id == directory_.self().id || !(is_expected || is_restarted || is_id_free)) {
    throw Error(
        ErrorCode::kProtocol, "it says it is " + toString(peer) + ", which the group knows as another worker",
        peer.name);
  }
  link.checkIdentity(peer);
  if (known && is_expected && known->is_member && !link.isMember()) throw falseRole(peer);
  // A worker that was started again under another id may have the same name, unless the worker that had the name is
  // still connected. This also bounds what one worker may use here: limits count by its name or by its id.
  for (const auto& other : allLinks()) {
    const auto& namesake = other->peer();
    if (namesake.id == peer.id && namesake != peer && known && !is_id_free) {
      other->is_replaced_ = true;  // it has claimed the id of this worker while that was lost
      other->close(Error(ErrorCode::kWorkerLost, toString(peer) + ", which has this id, is back", peer.name));
    }
    if (namesake.name != peer.name || namesake.id == peer.id || other->isClosed()) continue;
    // A worker that has left may join again before its earlier connection ends. This node sends to known workers only.
    if (hasLink(namesake.id) && directory_.info(peer.name) != namesake) continue;
    throw Error(
        ErrorCode::kProtocol, "it says it is " + toString(peer) + ", which is the name of " + toString(namesake));
  }
  link.incarnation_ = incarnation;
  if (is_restarted) events_.on_new_incarnation({peer, incarnation, link.isMember()});
  // Done before the link has a peer, because the end of a link that is refused here must not count as the loss of that
  // worker.
  if (options_.quotas) takeQuota(link, peer.name);
  link.peer_ = peer;
  {
    MutexLock lock(mutex_);
    all_links_.emplace(link.id(), link.weak_from_this());
  }
  // The worker may have been admitted since it was looked up: replaceLinks() finds the link, or this finds the record.
  const auto admitted = directory_.find(peer.id);
  if (!admitted || (is_id_free && admitted->info == known->info)) return;
  if (admitted->info != peer || admitted->incarnation > incarnation) {
    link.is_replaced_ = true;
    throw Error(ErrorCode::kProtocol, toString(admitted->info) + " has joined meanwhile", peer.name);
  }
  use(link.shared_from_this());
}

void ConnectionPool::use(const std::shared_ptr<Link>& link) {
  std::shared_ptr<Link> replaced;  // destroyed after the lock
  MutexLock lock(mutex_);
  if (!all_links_.contains(link->id())) return;  // it has ended
  // A second connection of the same incarnation does not replace the one over which this node sends.
  auto& used = links_[link->peer().id];
  if (!used || used->incarnation() < link->incarnation()) replaced = std::exchange(used, link);
}

// The first connection beyond the quota stays open, and each request over it is answered with the error, so that the
// peer learns the reason. Further connections are closed at once.
void ConnectionPool::takeQuota(Link& link, const std::string& peer) {
  if (std::exchange(link.is_counted_, true)) return;
  link.usage_ = options_.quotas->usageOf(peer);
  if (!link.usage_) return;
  CallerUsage::Token token;
  try {
    token = link.usage_->takeConnection();
  } catch (const Error& error) {
    token = link.usage_->takeRefusedConnection();
    link.refusal_ = error;
    recordRefusal(link.nameForAudit(peer), error);
  }
  MutexLock lock(link.mutex_);
  link.connection_token_.swap(token);
}

void ConnectionPool::recordRefusal(const std::string& peer, const Error& reason, std::string_view action) const {
  if (!options_.audit_log) return;
  options_.audit_log->record(
      {.time = std::chrono::system_clock::now(),
       .caller = peer,
       .action = std::string(action),
       .outcome = AuditEvent::Outcome::kRefused,
       .error = std::string(name(reason.code())),
       .reason = reason.text()});
}

void ConnectionPool::replaceLinks(const WorkerInfo& worker, uint64_t incarnation, const Error& reason) {
  for (const auto& link : allLinks()) {
    if (link->peer().id != worker.id) continue;
    if (link->peer() == worker && link->incarnation() == incarnation) {
      use(link);
    } else {
      link->is_replaced_ = true;
      link->close(reason);
    }
  }
}

namespace {

/// The outcome of several PINGs: true from the first answer on, false when all have failed.
class PingOutcome {
 public:
  explicit PingOutcome(size_t count) : open_(count) {}
  void onAnswer() {
    if (!has_answer_.exchange(true)) is_answered_.set(true);
  }
  void onFailed() {
    if (open_.fetch_sub(1) == 1) is_answered_.set(false);
  }
  /// nullopt: not known after `timeout`.
  std::optional<bool> waitFor(Duration timeout) { return is_answered_.waitFor(timeout); }

 private:
  std::atomic<size_t> open_;  ///< PINGs that have not failed
  std::atomic<bool> has_answer_{false};
  Waiter<bool> is_answered_;
};

/// Waits for the answer to a PING, which is the first frame. The end of the connection before it is a failure.
struct PingProbe : ConnectionHandler {
  const std::shared_ptr<PingOutcome> outcome;
  bool is_done = false;  // on the loop

  explicit PingProbe(std::shared_ptr<PingOutcome> outcome) : outcome(std::move(outcome)) {}
  void onFrame(Frame) override {
    if (!std::exchange(is_done, true)) outcome->onAnswer();
  }
  void onClosed(const Error&) override {
    if (!std::exchange(is_done, true)) outcome->onFailed();
  }
};

constexpr size_t kMaxOpenPings = 32;

}  // namespace

bool ConnectionPool::anyAnswersPing(const std::vector<WorkerRecord>& workers, Duration timeout) {
  for (size_t begin = 0; begin < workers.size(); begin += kMaxOpenPings) {
    const auto end = std::min(begin + kMaxOpenPings, workers.size());
    const auto outcome = std::make_shared<PingOutcome>(end - begin);
    std::vector<std::shared_ptr<Connection>> connections;
    for (size_t i = begin; i < end; ++i) {
      try {
        const auto probe = std::make_shared<PingProbe>(outcome);
        connections.push_back(transport_.connect(workers[i].address, workers[i].info.name, probe));
        connections.back()->send(encodeFrame({.kind = Kind::kPing}), [](const Status&) {});
      } catch (const Error&) {
        outcome->onFailed();
      }
    }
    const bool is_answered = outcome->waitFor(timeout).value_or(false);
    for (const auto& connection : connections) connection->close();
    if (is_answered) return true;
  }
  return false;
}

std::shared_ptr<Link> ConnectionPool::link(WorkerId to) {
  std::shared_ptr<Link> fresh;
  {
    MutexLock lock(mutex_);
    if (auto it = links_.find(to); it != links_.end()) return it->second;
  }
  const auto record = directory_.find(to);
  if (!record) {
    const auto name = directory_.info(to).name;
    throw Error(ErrorCode::kUnknownWorker, "could not find destination " + name + " in the RPC group", name);
  }
  {
    MutexLock lock(mutex_);
    auto [it, added] = links_.try_emplace(to);
    if (!added) return it->second;
    fresh = it->second = std::make_shared<Link>(*this, next_link_++, record->info, record->incarnation);
    all_links_.emplace(fresh->id(), fresh);
  }
  try {
    if (record->address.empty()) {
      throw Error(ErrorCode::kWorkerLost, record->info.name + " has been started again and is about to join");
    }
    auto connection = transport_.connect(record->address, record->info.name, fresh);
    const Message message{.kind = Kind::kHello, .payload = hello()};
    connection->send(encodeFrame(message), [](const Status&) {});
    fresh->attach(connection);
  } catch (const Error& e) {
    fresh->onClosed(e);
  }
  return fresh;
}

void ConnectionPool::remove(const Link& link, const Error& reason) {
  std::shared_ptr<Link> removed;  // destroyed after the lock
  {
    MutexLock lock(mutex_);
    all_links_.erase(link.id());
    auto it = links_.find(link.peer().id);
    if (it != links_.end() && it->second.get() == &link) {
      removed = std::move(it->second);
      links_.erase(it);
    }
  }
  if (link.peer().id != kNoWorker) events_.on_lost(link, reason);
}

std::vector<std::shared_ptr<Link>> ConnectionPool::links() const {
  std::vector<std::shared_ptr<Link>> out;
  MutexLock lock(mutex_);
  for (const auto& [peer, link] : links_) out.push_back(link);
  return out;
}

bool ConnectionPool::hasLink(WorkerId to) const {
  MutexLock lock(mutex_);
  return links_.contains(to);
}

std::vector<std::shared_ptr<Link>> ConnectionPool::allLinks() const {
  std::vector<std::shared_ptr<Link>> out;
  MutexLock lock(mutex_);
  for (const auto& [id, each] : all_links_) {
    if (auto link = each.lock()) out.push_back(std::move(link));
  }
  return out;
}

std::shared_ptr<Link> ConnectionPool::find(uint64_t id) const {
  MutexLock lock(mutex_);
  const auto found = all_links_.find(id);
  return found == all_links_.end() ? nullptr : found->second.lock();
}

bool ConnectionPool::isOpen(uint64_t id) const {
  const auto link = find(id);
  return link && !link->isClosed();
}

ConnectionPool::Queued ConnectionPool::queued() const {
  Queued queued;
  for (const auto& link : allLinks()) {
    queued.reply_bytes += link->replyQueue().queuedBytes();
    queued.deferred_calls += link->replyQueue().deferredCount();
    queued.held_calls += link->heldCount();
  }
  return queued;
}

size_t ConnectionPool::size() const {
  MutexLock lock(mutex_);
  return links_.size();
}

}  // namespace torchrpc
