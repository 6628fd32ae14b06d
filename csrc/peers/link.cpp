#include "peers/link.h"

#include "base/log.h"
#include "peers/connection_pool.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {
/// Requests that are sent until they are answered are small. A larger one counts as other requests do.
constexpr uint64_t kMaxUncountedBytes = 1 << 20;
}  // namespace

Error falseRole(const WorkerInfo& peer) {
  return {
      ErrorCode::kProtocol, toString(peer) + " says in its record that it is a member, but has proved to be a client",
      peer.name};
}

Error replacedError(const WorkerInfo& worker) {
  return {ErrorCode::kWorkerLost, worker.name + " has been started again", worker.name};
}

Link::Link(ConnectionPool& pool, uint64_t id, Peer peer)
    : pool_(pool),
      id_(id),
      is_inbound_(peer.id == kNoWorker),
      peer_(std::move(peer)),
      started_calls_(pool.options_.max_queued_bytes, pool.senders_),
      reply_queue_(pool.options_.max_queued_bytes) {
  if (pool_.options_.quotas && peer_.id != kNoWorker) usage_ = pool_.options_.quotas->usageOf(peer_.name);
}

void Link::send(Frame&& frame, SentHandler&& done) {
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

void Link::sendCall(CallId call, Frame&& frame, SentHandler&& done) {
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

void Link::onFrame(Frame&& frame) {
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
  peer_.is_member = identity.isMember();
  if (peer_.id == kNoWorker) {
    countConnection(identity.name);
    return;
  }
  const auto record = pool_.directory_.find(peer_.id);
  if (!record || !record->is_member || peer_.is_member) return;
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
  if (info && isReliable(info->kind) && peer_.is_member && bytes <= kMaxUncountedBytes) return std::nullopt;
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

void Link::onFirstFrame(Frame&& frame) {
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

}  // namespace torchrpc
