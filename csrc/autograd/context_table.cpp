#include "autograd/context_table.h"

#include "wire/codec.h"

namespace torchrpc {

namespace {

void writeRoll(const LiveSetSnapshot& roll, Writer& writer) {
  writer.put(roll.owner);
  writer.put(roll.version);
  writer.put(roll.next);
  writer.put<uint32_t>(static_cast<uint32_t>(roll.alive.size()));
  for (const auto id : roll.alive) writer.put(id);
}

std::vector<LiveSetSnapshot> readRolls(std::string_view bytes) {
  std::vector<LiveSetSnapshot> rolls;
  Reader reader(bytes);
  while (reader.remaining() > 0) {
    auto& roll = rolls.emplace_back();
    roll.owner = reader.get<WorkerId>();
    roll.version = reader.get<uint64_t>();
    roll.next = reader.get<int64_t>();
    for (auto left = reader.get<uint32_t>(); left > 0; --left) roll.alive.insert(reader.get<ContextId>());
  }
  return rolls;
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

ContextPtr ContextTable::enter(ContextId id) {
  MutexLock lock(mutex_);
  if (const auto found = contexts_.find(id); found != contexts_.end()) return found->second;
  const auto owner = makerOf(id);
  if (closed_ || owner == self_) return nullptr;
  if (const auto roll = rolls_.find(owner); roll != rolls_.end() && roll->second.hasEnded(id)) return nullptr;
  return contexts_.emplace(id, std::make_shared<AutogradContext>(id)).first->second;
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

void ContextTable::scheduleSnapshot(WorkerId owner, const std::set<WorkerId>& workers) {
  MutexLock lock(mutex_);
  // Of another's context that was only let go of here, its owner has said nothing yet.
  if (owner != self_ && !rolls_.contains(owner)) return;
  for (const auto worker : workers) {
    if (worker != self_ && worker != owner) owed_[worker].insert(owner);
  }
}

LiveSetSnapshot ContextTable::ownRoll() const {
  LiveSetSnapshot roll{.owner = self_, .version = version_, .next = next_context_};
  for (const auto& [id, context] : contexts_) {
    if (context->owner() == self_) roll.alive.insert(id);
  }
  return roll;
}

std::string ContextTable::takeRolls(WorkerId worker) {
  std::string out;
  MutexLock lock(mutex_);
  const auto owners = owed_.extract(worker);
  if (!owners) return out;
  Writer writer(out);
  for (const auto owner : owners.mapped()) writeRoll(owner == self_ ? ownRoll() : rolls_.at(owner), writer);
  return out;
}

void ContextTable::rescheduleSnapshot(WorkerId worker, std::string_view rolls) {
  for (const auto& roll : readRolls(rolls)) scheduleSnapshot(roll.owner, {worker});
}

std::vector<WorkerId> ContextTable::owed() const {
  std::vector<WorkerId> out;
  MutexLock lock(mutex_);
  for (const auto& [worker, owners] : owed_) out.push_back(worker);
  return out;
}

std::vector<ContextPtr> ContextTable::removeEnded(const LiveSetSnapshot& roll) {
  std::vector<ContextPtr> ended;
  for (auto it = contexts_.begin(); it != contexts_.end();) {
    if (makerOf(it->first) == roll.owner && roll.hasEnded(it->first)) {
      ended.push_back(std::move(it->second));
      it = contexts_.erase(it);
    } else {
      ++it;
    }
  }
  return ended;
}

std::vector<ContextPtr> ContextTable::takeIn(std::string_view bytes) {
  std::vector<ContextPtr> ended;
  auto rolls = readRolls(bytes);
  MutexLock lock(mutex_);
  for (auto& roll : rolls) {
    if (roll.owner == self_) continue;
    auto& latest = rolls_[roll.owner];
    if (latest.version >= roll.version) continue;
    latest = std::move(roll);
    auto removed = removeEnded(latest);
    std::move(removed.begin(), removed.end(), std::back_inserter(ended));
  }
  return ended;
}

std::vector<ContextPtr> ContextTable::removeAllOf(WorkerId id) {
  MutexLock lock(mutex_);
  // Late messages, of its own or of workers that do not know yet, are to make nothing again.
  rolls_[id] = {.owner = id, .version = UINT64_MAX, .next = kLargestCounter + 1};
  owed_.erase(id);
  return removeEnded(rolls_[id]);
}

void ContextTable::welcome(WorkerId id) {
  MutexLock lock(mutex_);
  rolls_.erase(id);
}

std::vector<ContextPtr> ContextTable::close() {
  std::vector<ContextPtr> out;
  MutexLock lock(mutex_);
  closed_ = true;
  for (auto& [id, context] : std::exchange(contexts_, {})) out.push_back(std::move(context));
  owed_.clear();
  return out;
}

}  // namespace torchrpc
