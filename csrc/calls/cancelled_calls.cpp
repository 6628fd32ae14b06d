#include "calls/cancelled_calls.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace torchrpc {

namespace {
using Handlers = std::vector<CancelledCalls::Handler>;

void callAll(const Handlers& handlers) {
  for (const auto& handler : handlers) handler();
}

void moveTo(Handlers& to, Handlers& from) { std::ranges::move(std::exchange(from, {}), std::back_inserter(to)); }
}  // namespace

void CancelledCalls::cancel(ServedId id, CancelKind kind) {
  Handlers handlers;
  {
    MutexLock lock(mutex_);
    makeRoom(id.link);
    auto& entry = entries_[id];
    entry.is_abandoned = true;
    moveTo(handlers, entry.abandon_handlers);
    if (kind == CancelKind::kStop) {
      entry.is_cancelled = true;
      moveTo(handlers, entry.handlers);
    }
    updateSize();
  }
  callAll(handlers);
}

void CancelledCalls::makeRoom(uint64_t link) {
  if (entries_.size() < kMost) return;
  for (auto it = entries_.lower_bound({link, 0}); it != entries_.end() && it->first.link == link; ++it) {
    if (!it->second.hasHandlers()) return void(entries_.erase(it));
  }
}

void CancelledCalls::loseLink(uint64_t link) {
  if (size() == 0) return;
  Handlers handlers;
  {
    MutexLock lock(mutex_);
    for (auto it = entries_.lower_bound({link, 0}); it != entries_.end() && it->first.link == link;) {
      moveTo(handlers, it->second.handlers);
      moveTo(handlers, it->second.abandon_handlers);
      it = entries_.erase(it);
    }
    updateSize();
  }
  callAll(handlers);
}

bool CancelledCalls::onCancelled(ServedId id, Handler handler, CancelKind kind) {
  if (id.call == 0) return true;
  MutexLock lock(mutex_);
  auto& entry = entries_[id];
  updateSize();
  const bool is_abandon = kind == CancelKind::kAbandon;
  if (is_abandon ? entry.is_abandoned : entry.is_cancelled) return false;
  (is_abandon ? entry.abandon_handlers : entry.handlers).push_back(std::move(handler));
  return true;
}

bool CancelledCalls::isCancelled(ServedId id) const {
  if (size() == 0) return false;
  MutexLock lock(mutex_);
  const auto it = entries_.find(id);
  return it != entries_.end() && it->second.is_cancelled;
}

void CancelledCalls::onAnswered(ServedId id) {
  if (size() == 0) return;
  Entry ended;  // destroyed under no lock
  MutexLock lock(mutex_);
  const auto it = entries_.find(id);
  if (it == entries_.end()) return;
  std::swap(ended, it->second);
  entries_.erase(it);
  updateSize();
  lock.unlock();
}

}  // namespace torchrpc
