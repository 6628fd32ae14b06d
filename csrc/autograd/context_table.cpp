#include "autograd/context_table.h"

#include <algorithm>

#include "wire/codec.h"

namespace torchrpc {

namespace {

LiveSetSnapshot noneOf(WorkerId lost_owner) {
  return {.owner = lost_owner, .version = LiveSetSnapshot::kOwnerLost, .next = kLargestCounter + 1};
}

void writeSnapshot(const LiveSetSnapshot& snapshot, Writer& writer) {
  writer.put(snapshot.owner);
  writer.put(snapshot.version);
  writer.put(snapshot.next);
  writer.put<uint32_t>(static_cast<uint32_t>(snapshot.alive.size()));
  for (const auto id : snapshot.alive) writer.put(id);
}

std::vector<LiveSetSnapshot> readSnapshots(std::string_view bytes) {
  std::vector<LiveSetSnapshot> snapshots;
  Reader reader(bytes);
  while (reader.remaining() > 0) {
    auto& snapshot = snapshots.emplace_back();
    snapshot.owner = reader.get<WorkerId>();
    snapshot.version = reader.get<uint64_t>();
    snapshot.next = reader.get<int64_t>();
    for (auto left = reader.get<uint32_t>(); left > 0; --left) snapshot.alive.insert(reader.get<ContextId>());
  }
  return snapshots;
}

}  // namespace

ContextPtr ContextTable::create() {
  MutexLock lock(mutex_);
  if (closed_) throw Error(ErrorCode::kShutdown, "RPC has been shut down: there are no autograd contexts any more");
  if (next_context_ > kLargestCounter) {
    throw Error(ErrorCode::kUnknown, "this worker has used up its autograd context ids: start it again");
  }
  const auto id = makeAutogradId(self_, next_context_++);
  return contexts_.emplace(id, std::make_shared<AutogradContext>(id)).first->second;
}

ContextPtr ContextTable::find(ContextId id) const {
  MutexLock lock(mutex_);
  const auto found = contexts_.find(id);
  return found == contexts_.end() ? nullptr : found->second;
}

ContextPtr ContextTable::findOrCreate(ContextId id) {
  MutexLock lock(mutex_);
  if (const auto found = contexts_.find(id); found != contexts_.end()) return found->second;
  const auto owner = makerOf(id);
  if (closed_ || owner == self_) return nullptr;
  if (hasEnded(id)) return nullptr;
  const auto heard = heard_next_.find(owner);
  const bool may_have_ended = heard != heard_next_.end() && (id & kLargestCounter) < heard->second;
  if (may_have_ended || lost_elsewhere_.contains(owner)) unconfirmed_owners_.insert(owner);
  return contexts_.emplace(id, std::make_shared<AutogradContext>(id)).first->second;
}

bool ContextTable::mustConfirm(WorkerId owner) const {
  MutexLock lock(mutex_);
  return lost_owners_.contains(owner) || unconfirmed_owners_.contains(owner);
}

void ContextTable::onOwnerConfirmed(WorkerId owner) {
  MutexLock lock(mutex_);
  lost_owners_.erase(owner);
  unconfirmed_owners_.erase(owner);
}

bool ContextTable::hasEnded(ContextId id) const {
  const auto owner = makerOf(id);
  const auto first = first_contexts_.find(owner);
  if (first != first_contexts_.end() && (id & kLargestCounter) < first->second) return true;
  const auto snapshot = latest_snapshots_.find(owner);
  return snapshot != latest_snapshots_.end() && snapshot->second.hasEnded(id);
}

bool ContextTable::hasContextOf(WorkerId owner) const {
  return std::ranges::any_of(contexts_, [owner](const auto& each) { return makerOf(each.first) == owner; });
}

ContextPtr ContextTable::remove(ContextId id) {
  MutexLock lock(mutex_);
  auto node = contexts_.extract(id);
  if (!node) return nullptr;
  if (makerOf(id) == self_) ++version_;
  return std::move(node.mapped());
}

MessageId ContextTable::newMessageId() {
  MutexLock lock(mutex_);
  return makeAutogradId(self_, next_message_++ & kLargestCounter);
}

size_t ContextTable::size() const {
  MutexLock lock(mutex_);
  return contexts_.size();
}

std::vector<ContextPtr> ContextTable::all() const {
  std::vector<ContextPtr> out;
  MutexLock lock(mutex_);
  for (const auto& [id, context] : contexts_) out.push_back(context);
  return out;
}

void ContextTable::scheduleSnapshot(WorkerId owner, const std::set<WorkerId>& workers, bool is_lost) {
  MutexLock lock(mutex_);
  is_lost = is_lost || lost_owners_.contains(owner);
  // The context of another owner was only released here, and its owner has sent no snapshot yet.
  if (owner != self_ && !latest_snapshots_.contains(owner) && !is_lost) return;
  for (const auto worker : workers) schedule(owner, worker, is_lost);
}

void ContextTable::schedule(WorkerId owner, WorkerId receiver, bool is_lost) {
  if (receiver == self_ || receiver == owner) return;
  auto& scheduled = scheduled_snapshots_[receiver][owner];
  scheduled = scheduled || is_lost;
  has_scheduled_ = true;
}

LiveSetSnapshot ContextTable::ownSnapshot() const {
  LiveSetSnapshot snapshot{.owner = self_, .version = version_, .next = next_context_};
  for (const auto& [id, context] : contexts_) {
    if (context->owner() == self_) snapshot.alive.insert(id);
  }
  return snapshot;
}

std::string ContextTable::takeScheduledSnapshots(WorkerId worker) {
  std::string out;
  if (!has_scheduled_) return out;
  MutexLock lock(mutex_);
  const auto owners = scheduled_snapshots_.extract(worker);
  has_scheduled_ = !scheduled_snapshots_.empty();
  if (!owners) return out;
  Writer writer(out);
  for (const auto& [owner, is_lost] : owners.mapped()) {
    if (owner == self_) {
      writeSnapshot(ownSnapshot(), writer);
    } else if (is_lost) {
      // Even if the owner has answered since: its contexts have ended here, so no other notice about them follows.
      writeSnapshot(noneOf(owner), writer);
    } else if (const auto latest = latest_snapshots_.find(owner); latest != latest_snapshots_.end()) {
      writeSnapshot(latest->second, writer);
    }
  }
  return out;
}

void ContextTable::rescheduleSnapshots(WorkerId worker, std::string_view snapshots) {
  const auto undelivered = readSnapshots(snapshots);
  MutexLock lock(mutex_);
  for (const auto& each : undelivered) schedule(each.owner, worker, each.version == LiveSetSnapshot::kOwnerLost);
}

std::vector<WorkerId> ContextTable::workersWithScheduledSnapshots() const {
  std::vector<WorkerId> out;
  MutexLock lock(mutex_);
  for (const auto& [worker, owners] : scheduled_snapshots_) out.push_back(worker);
  return out;
}

std::vector<ContextPtr> ContextTable::removeEnded(const LiveSetSnapshot& snapshot) {
  std::vector<ContextPtr> ended;
  for (auto it = contexts_.begin(); it != contexts_.end();) {
    if (makerOf(it->first) == snapshot.owner && snapshot.hasEnded(it->first)) {
      ended.push_back(std::move(it->second));
      it = contexts_.erase(it);
    } else {
      ++it;
    }
  }
  return ended;
}

bool ContextTable::hearOf(const LiveSetSnapshot& snapshot) {
  const auto latest = latest_snapshots_.find(snapshot.owner);
  if (latest != latest_snapshots_.end() && latest->second.order() >= snapshot.order()) return false;
  auto& next = heard_next_[snapshot.owner];
  next = std::max(next, snapshot.next);
  return std::ranges::any_of(contexts_, [&](const auto& each) {
    return makerOf(each.first) == snapshot.owner && snapshot.hasEnded(each.first);
  });
}

ContextTable::Applied ContextTable::applySnapshots(std::string_view bytes, WorkerId from) {
  Applied applied;
  auto snapshots = readSnapshots(bytes);
  MutexLock lock(mutex_);
  for (auto& snapshot : snapshots) {
    if (snapshot.owner == self_ || !canMake(snapshot.owner)) continue;
    if (snapshot.version == LiveSetSnapshot::kOwnerLost) {
      lost_elsewhere_.insert(snapshot.owner);
      if (hasContextOf(snapshot.owner)) applied.doubtful.push_back(snapshot.owner);
      continue;
    }
    if (snapshot.owner != from) {
      if (hearOf(snapshot)) applied.to_ask.push_back(snapshot.owner);
      continue;
    }
    auto& latest = latest_snapshots_[snapshot.owner];
    if (latest.order() >= snapshot.order()) continue;
    latest = std::move(snapshot);
    if (const auto heard = heard_next_.find(from); heard != heard_next_.end() && heard->second <= latest.next) {
      heard_next_.erase(heard);
    }
    auto removed = removeEnded(latest);
    std::move(removed.begin(), removed.end(), std::back_inserter(applied.ended));
  }
  return applied;
}

std::vector<ContextPtr> ContextTable::removeAllOf(WorkerId id) {
  MutexLock lock(mutex_);
  lost_owners_.insert(id);
  scheduled_snapshots_.erase(id);
  return removeEnded(noneOf(id));
}

std::optional<std::vector<ContextPtr>> ContextTable::onWorkerJoined(WorkerId id, int64_t first) {
  MutexLock lock(mutex_);
  auto& known = first_contexts_[id];
  if (known >= first) return std::nullopt;
  known = first;
  latest_snapshots_.erase(id);  // a false one of the earlier start could end contexts that are yet to come
  lost_owners_.erase(id);
  lost_elsewhere_.erase(id);
  heard_next_.erase(id);
  unconfirmed_owners_.erase(id);
  return removeEnded({.owner = id, .next = first});
}

std::vector<ContextPtr> ContextTable::close() {
  std::vector<ContextPtr> out;
  MutexLock lock(mutex_);
  closed_ = true;
  for (auto& [id, context] : std::exchange(contexts_, {})) out.push_back(std::move(context));
  scheduled_snapshots_.clear();
  return out;
}

}  // namespace torchrpc
