#include "agent/connection_pool.h"

#include <algorithm>

#include "base/log.h"
#include "base/sync/waiter.h"
#include "wire/codec.h"

namespace torchrpc {

// --- Link ---

Link::Link(ConnectionPool& pool, uint64_t id, WorkerInfo peer, uint64_t incarnation)
    : pool_(pool),
      id_(id),
      peer_(std::move(peer)),
      incarnation_(incarnation),
      started_calls_(pool.options_.max_queued_bytes, pool.senders_),
      reply_queue_(pool.options_.max_queued_bytes) {
  if (pool_.options_.quotas && peer_.id != kNoWorker) usage_ = pool_.options_.quotas->usageOf(peer_.name);
}

void Link::send(Frame frame, std::function<void(Status)> done) {
  std::shared_ptr<Connection> connection;
  Status closed;
  {
    MutexLock lock(mutex_);
    closed = closed_ ? closed_ : close_reason_;
    if (!closed && !connection_) {
      waiting_.push_back({std::move(frame), std::move(done)});
      return;
    }
    connection = connection_;
  }
  if (closed) {
    done(std::move(closed));
  } else {
    connection->send(std::move(frame), std::move(done));
  }
}

void Link::sendCall(CallId call, Frame frame, std::function<void(Status)> done) {
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
    connection = connection_;
    token.swap(connection_token_);
  }
  if (connection) connection->close();
}

uint64_t Link::progress() {
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    connection = connection_;
  }
  return connection ? connection->progress() : 0;
}

std::string Link::describe() {
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    connection = connection_;
  }
  return connection ? connection->describe() : "";
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
    pool_.recordRefusal(e.worker(), e);
    close(e);
  }
}

void Link::checkIdentity(const WorkerInfo& peer) const {
  if (identity_ && identity_->mayOnlyInspect()) {
    throw Error(
        ErrorCode::kProtocol, identity_->name + " has the role observer only: it may look at workers, but be none",
        identity_->name);
  }
  if (!identity_ || identity_->name == peer.name) return;
  throw Error(
      ErrorCode::kProtocol, "it says it is " + toString(peer) + ", but has proved to be worker " + identity_->name);
}

void Link::onFirstFrame(Frame frame) {
  const auto info = peekFrame(frame.head);
  if (info && info->kind == Kind::kPing) {
    send(encodeFrame({.kind = Kind::kPong}), [](const Status&) {});
  } else if (info && info->kind == Kind::kInspect) {
    pool_.events_.on_inspect(shared_from_this(), std::move(frame));
  } else {
    pool_.acceptHello(*this, std::move(frame));
  }
}

void Link::onClosed(const Error& ended) {
  Error reason = ended;
  std::deque<Waiting> waiting;
  std::shared_ptr<Connection> connection;
  CallerUsage::Token token;
  {
    MutexLock lock(mutex_);
    if (closed_) return;
    if (close_reason_) reason = *close_reason_;
    token.swap(connection_token_);
    closed_ = reason;
    waiting.swap(waiting_);
    connection.swap(connection_);
  }
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
  if (peer.id < 0 || peer.id == directory_.self().id || !(is_expected || is_restarted)) {
    throw Error(
        ErrorCode::kProtocol, "it says it is " + toString(peer) + ", which the group knows as another worker",
        peer.name);
  }
  link.checkIdentity(peer);
  // A worker that was started again under another id may have the same name, unless the worker that had the name is
  // still connected.
  const auto namesake = directory_.info(peer.name);
  if (namesake && namesake->id != peer.id && hasLink(namesake->id)) {
    throw Error(
        ErrorCode::kProtocol, "it says it is " + toString(peer) + ", which is the name of " + toString(*namesake));
  }
  link.incarnation_ = incarnation;
  if (!known || is_restarted) events_.on_new_incarnation(peer, incarnation);
  // Done before the link has a peer, because the end of a link that is refused here must not count as the loss of that
  // worker.
  if (options_.quotas) takeQuota(link, peer);
  link.peer_ = peer;
  std::shared_ptr<Link> replaced;  // destroyed after the lock
  MutexLock lock(mutex_);
  all_links_.emplace(link.id(), link.weak_from_this());
  // A second connection of the same incarnation does not replace the one over which this node sends.
  auto& used = links_[peer.id];
  if (!used || used->incarnation() < incarnation) replaced = std::exchange(used, link.shared_from_this());
}

// The first connection beyond the quota stays open, and each request over it is answered with the error, so that the
// peer learns the reason. Further connections are closed at once.
void ConnectionPool::takeQuota(Link& link, const WorkerInfo& peer) {
  link.usage_ = options_.quotas->usageOf(peer.name);
  if (!link.usage_) return;
  CallerUsage::Token token;
  try {
    token = link.usage_->takeConnection();
  } catch (const Error& error) {
    token = link.usage_->takeRefusedConnection();
    link.refusal_ = error;
    recordRefusal(peer.name, error);
  }
  MutexLock lock(link.mutex_);
  link.connection_token_.swap(token);
}

void ConnectionPool::recordRefusal(const std::string& peer, const Error& reason) {
  if (!options_.audit_log) return;
  options_.audit_log->record(
      {.time = std::chrono::system_clock::now(),
       .caller = peer,
       .action = "connect",
       .outcome = AuditEvent::Outcome::kRefused,
       .error = std::string(name(reason.code())),
       .reason = reason.text()});
}

void ConnectionPool::closeAll(const WorkerRecord& peer, const Error& reason) {
  for (const auto& link : allLinks()) {
    if (link->peer() != peer.info || link->incarnation() != peer.incarnation) continue;
    link->is_replaced_ = true;
    link->close(reason);
  }
}

namespace {

/// The outcome of several PINGs. It is set once: to true by the first answer, to false when all have failed.
struct PingOutcome {
  Waiter<bool> is_answered;
  std::atomic<size_t> open;

  explicit PingOutcome(size_t count) : open(count) {}
  void onFailed() {
    if (open.fetch_sub(1) == 1) is_answered.set(false);
  }
};

/// Waits for the answer to a PING, which is the first frame. The end of the connection before it is a failure.
struct PingProbe : ConnectionHandler {
  const std::shared_ptr<PingOutcome> outcome;
  bool is_done = false;  // on the loop

  explicit PingProbe(std::shared_ptr<PingOutcome> outcome) : outcome(std::move(outcome)) {}
  void onFrame(Frame) override {
    if (!std::exchange(is_done, true)) outcome->is_answered.set(true);
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
    const bool is_answered = outcome->is_answered.waitFor(timeout).value_or(false);
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

bool ConnectionPool::isOpen(uint64_t id) const {
  std::shared_ptr<Link> link;
  {
    MutexLock lock(mutex_);
    if (const auto found = all_links_.find(id); found != all_links_.end()) link = found->second.lock();
  }
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
