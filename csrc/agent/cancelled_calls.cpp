#include "agent/cancelled_calls.h"

#include <iterator>
#include <utility>

namespace torchrpc {

namespace {
void callAll(const std::vector<CancelledCalls::Handler>& handlers) {
  for (const auto& handler : handlers) handler();
}
}  // namespace

void CancelledCalls::cancel(ServedId id) {
  std::vector<Handler> handlers;
  {
    MutexLock lock(mutex_);
    makeRoom(id.link);
    auto& entry = entries_[id];
    entry.is_cancelled = true;
    handlers.swap(entry.handlers);
    updateSize();
  }
  callAll(handlers);
}

void CancelledCalls::makeRoom(uint64_t link) {
  if (entries_.size() < kMost) return;
  for (auto it = entries_.lower_bound({link, 0}); it != entries_.end() && it->first.link == link; ++it) {
    if (it->second.handlers.empty()) return void(entries_.erase(it));
  }
}

void CancelledCalls::loseLink(uint64_t link) {
  if (size() == 0) return;
  std::vector<Handler> handlers;
  {
    MutexLock lock(mutex_);
    for (auto it = entries_.lower_bound({link, 0}); it != entries_.end() && it->first.link == link;) {
      std::move(it->second.handlers.begin(), it->second.handlers.end(), std::back_inserter(handlers));
      it = entries_.erase(it);
    }
    updateSize();
  }
  callAll(handlers);
}

bool CancelledCalls::onCancelled(ServedId id, Handler handler) {
  if (id.call == 0) return true;
  MutexLock lock(mutex_);
  auto& entry = entries_[id];
  updateSize();
  if (!entry.is_cancelled) entry.handlers.push_back(std::move(handler));
  return !entry.is_cancelled;
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
