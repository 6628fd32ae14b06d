#include "calls/call_table.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace torchrpc {

void CallTable::addDeadline(TimePoint deadline, CallId id) {
  deadlines_.emplace_back(deadline, id);
  std::ranges::push_heap(deadlines_, std::greater());
  // Most calls end long before their deadline. Their deadlines stay in the heap, because removing one costs more than
  // the call.
  constexpr size_t kMinToCompact = 64;
  if (deadlines_.size() < 2 * calls_.size() + kMinToCompact) return;
  std::erase_if(
      deadlines_, [this](const auto& each) TORCHRPC_REQUIRES(mutex_) { return !calls_.contains(each.second); });
  std::ranges::make_heap(deadlines_, std::greater());
}

std::pair<TimePoint, CallId> CallTable::popDeadline() {
  std::ranges::pop_heap(deadlines_, std::greater());
  const auto next = deadlines_.back();
  deadlines_.pop_back();
  return next;
}

bool CallTable::add(CallId id, ClientCall& call, bool& needs_timer) {
  MutexLock lock(mutex_);
  if (closed_) return false;
  const auto deadline = call.deadline;
  needs_timer = deadline < timer_at_;
  if (needs_timer) timer_at_ = deadline;
  bytes_ += call.bytes;
  call.id = id;
  if (spare_.empty()) {
    calls_.emplace(id, std::move(call));
  } else {
    auto node = std::move(spare_.back());
    spare_.pop_back();
    node.key() = id;
    node.mapped() = std::move(call);
    calls_.insert(std::move(node));
  }
  updateCapacity();
  if (deadline != kNever) addDeadline(deadline, id);
  return true;
}

bool CallTable::assign(CallId id, uint64_t link, PeerId callee) {
  MutexLock lock(mutex_);
  auto it = calls_.find(id);
  if (it == calls_.end()) return false;
  it->second.link = link;
  it->second.callee = callee;
  return true;
}

std::optional<ClientCall> CallTable::takeLocked(CallId id) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return std::nullopt;
  return takeAt(it);
}

ClientCall CallTable::takeAt(Calls::iterator it) {
  auto node = calls_.extract(it);
  auto call = std::exchange(node.mapped(), {});
  if (spare_.size() < kMaxSpare) spare_.push_back(std::move(node));
  bytes_ -= call.bytes;
  if (updateCapacity()) capacity_freed_.notify_all();
  return call;
}

std::optional<ClientCall> CallTable::take(CallId id) {
  MutexLock lock(mutex_);
  return takeLocked(id);
}

std::optional<ClientCall> CallTable::takeFor(CallId id, PeerId from, bool& is_foreign) {
  MutexLock lock(mutex_);
  const auto it = calls_.find(id);
  if (it == calls_.end()) return std::nullopt;
  is_foreign = !isFrom(it->second, from);
  if (is_foreign) return std::nullopt;
  return takeAt(it);
}

bool CallTable::contains(CallId id) const {
  MutexLock lock(mutex_);
  return calls_.contains(id);
}

bool CallTable::awaits(CallId id, PeerId from) const {
  MutexLock lock(mutex_);
  const auto it = calls_.find(id);
  return it != calls_.end() && isFrom(it->second, from);
}

std::vector<ClientCall> CallTable::takeLink(uint64_t link) {
  MutexLock lock(mutex_);
  std::vector<CallId> ids;
  for (const auto& [id, call] : calls_) {
    if (call.link == link) ids.push_back(id);
  }
  std::vector<ClientCall> out;
  for (auto id : ids) out.push_back(*takeLocked(id));
  return out;
}

std::vector<CallId> CallTable::madeFor(const ServedId& served) const {
  std::vector<CallId> ids;
  MutexLock lock(mutex_);
  for (const auto& [id, call] : calls_) {
    if (call.made_for == served) ids.push_back(id);
  }
  return ids;
}

std::vector<ClientCall> CallTable::takeExpired(TimePoint now, TimePoint& next) {
  MutexLock lock(mutex_);
  std::vector<ClientCall> out;
  next = kNever;
  if (now < timer_at_) return out;  // an earlier timer has expired the calls that this one was for
  while (!deadlines_.empty() && (deadlines_.front().first <= now || !calls_.contains(deadlines_.front().second))) {
    if (auto call = takeLocked(popDeadline().second)) out.push_back(*std::move(call));
  }
  next = timer_at_ = deadlines_.empty() ? kNever : deadlines_.front().first;
  return out;
}

std::vector<ClientCall> CallTable::close() {
  MutexLock lock(mutex_);
  closed_ = true;
  std::vector<ClientCall> out;
  for (auto& [id, call] : calls_) out.push_back(std::move(call));
  calls_.clear();
  deadlines_.clear();
  updateCapacity();
  capacity_freed_.notify_all();
  return out;
}

bool CallTable::waitForCapacity(Duration timeout) {
  if (!is_full_.load(std::memory_order_relaxed)) return true;
  MutexLock lock(mutex_);
  return capacity_freed_.wait_for(lock, timeout, [this] { return !is_full_.load(std::memory_order_relaxed); });
}

void CallTable::addOutstanding(std::set<WorkerId>& workers) const {
  MutexLock lock(mutex_);
  for (const auto& [id, call] : calls_) workers.insert(call.to);
}

std::vector<CallTable::Row> CallTable::rows(size_t most) const {
  std::vector<Row> out;
  MutexLock lock(mutex_);
  out.reserve(std::min(most, calls_.size()));
  for (const auto& [id, call] : calls_) {
    if (out.size() == most) break;
    out.push_back(
        {.id = id,
         .to = call.to,
         .kind = call.kind,
         .is_sent = call.link != 0,
         .since = call.since,
         .deadline = call.deadline,
         .bytes = call.bytes,
         .thread = call.thread});
  }
  return out;
}

size_t CallTable::size() const {
  MutexLock lock(mutex_);
  return calls_.size();
}

}  // namespace torchrpc
