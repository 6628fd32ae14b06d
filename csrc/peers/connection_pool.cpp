#include "peers/connection_pool.h"

#include <algorithm>

#include "base/log.h"
#include "base/sync/waiter.h"
#include "wire/codec.h"

namespace torchrpc {

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
  writer.put(directory_.self().incarnation);
  return payload;
}

// Note [Workers that are not known yet]
// A worker that joins a group that grows calls the members before they know it, and a worker that was started again
// may call before its announcement has arrived. Such a worker claims its id and the number of its start, and in a group
// without identities its name, so HELLO gives it no rights: this node answers its requests, but sends no request to it.
// Only when the worker has been admitted, and the directory has its record, does this node send over a link of the peer
// in the record. All other links with that id are closed then. So a peer that claims the id of a worker that will join
// later, or any start of a worker, neither gets the calls for that worker nor keeps it out.
// In a group that grows, the same holds for a worker of another name that claims the id of a lost worker.
void ConnectionPool::acceptHello(Link& link, Frame&& frame) {
  const auto message = decodeFrame(std::move(frame));
  if (message.kind != Kind::kHello) throw Error(ErrorCode::kProtocol, "it did not begin with HELLO");
  Reader reader(message.payload);
  if (const auto version = reader.get<uint32_t>(); version != kProtocolVersion) {
    throw Error(
        ErrorCode::kProtocol,
        "it speaks version " + std::to_string(version) + " of the protocol, this worker " +
            std::to_string(kProtocolVersion) + ": install the same torchrpc on all workers");
  }
  Peer peer;
  peer.is_member = link.peer_.is_member;
  peer.id = reader.get<WorkerId>();
  peer.name = reader.getString();
  peer.incarnation = reader.get<uint64_t>();
  reader.expectEnd();
  // A HELLO may arrive before the announcement that its worker has joined, or has been started again.
  const auto known = directory_.find(peer.id);
  const bool is_expected = !known || known->isOf(peer);
  const bool is_restarted = known && known->info == peer && known->peerId() < peer.peerId();
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
  if (known && is_expected && known->is_member && !peer.is_member) throw falseRole(peer);
  // A worker that was started again under another id may have the same name, unless the worker that had the name is
  // still connected. This also bounds what one worker may use here: limits count by its name or by its id.
  for (const auto& other : allLinks()) {
    const auto& namesake = other->peer();
    if (namesake.id == peer.id && namesake.name != peer.name && known && !is_id_free) {
      other->is_replaced_ = true;  // it has claimed the id of this worker while that was lost
      other->close(Error(ErrorCode::kWorkerLost, toString(peer) + ", which has this id, is back", peer.name));
    }
    if (namesake.name != peer.name || namesake.id == peer.id || other->isClosed()) continue;
    // A worker that has left may join again before its earlier connection ends. This node sends to known workers only.
    if (hasLink(namesake.id) && directory_.info(peer.name) != namesake) continue;
    throw Error(
        ErrorCode::kProtocol, "it says it is " + toString(peer) + ", which is the name of " + toString(namesake));
  }
  if (is_restarted) events_.on_restarted(peer);
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
  if (admitted->info != peer || peer.peerId() < admitted->peerId()) {
    link.is_replaced_ = true;
    throw Error(ErrorCode::kProtocol, toString(admitted->info) + " has joined meanwhile", peer.name);
  }
  use(link.shared_from_this());
}

void ConnectionPool::use(const std::shared_ptr<Link>& link) {
  std::shared_ptr<Link> replaced;  // destroyed after the lock
  MutexLock lock(mutex_);
  if (!all_links_.contains(link->id())) return;  // it has ended
  // A second connection of the same peer does not replace the one over which this node sends.
  auto& used = links_[link->peer().id];
  if (!used || used->peer().peerId() < link->peer().peerId()) replaced = std::exchange(used, link);
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

void ConnectionPool::replaceLinks(const Peer& peer, const Error& reason) {
  for (const auto& link : allLinks()) {
    if (link->peer().id != peer.id) continue;
    if (link->peer().name == peer.name && link->peer().peerId() == peer.peerId()) {
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
  void onFrame(Frame&&) override {
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
    // Not the role in the record: the peer has yet to prove it.
    fresh = it->second = std::make_shared<Link>(*this, next_link_++, Peer{record->info, record->incarnation});
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
