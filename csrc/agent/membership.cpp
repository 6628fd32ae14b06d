#include "agent/membership.h"

#include <utility>

namespace torchrpc {

void Membership::addHandler(Handler handler) {
  MutexLock lock(mutex_);
  handlers_.push_back(std::move(handler));
}

bool Membership::hasHandlers() const {
  MutexLock lock(mutex_);
  return !handlers_.empty();
}

void Membership::onJoined(const WorkerInfo& worker, bool is_replaced) {
  {
    MutexLock lock(mutex_);
    gone_.erase(worker.id);
  }
  report(worker, is_replaced ? MemberChange::kReplaced : MemberChange::kJoined);
}

void Membership::onGone(const WorkerInfo& worker, uint64_t incarnation, MemberChange change) {
  {
    MutexLock lock(mutex_);
    const auto [gone, is_new] = gone_.try_emplace(worker.id);
    if (!is_new && gone->second.incarnation >= incarnation) return;
    gone->second = {incarnation, change == MemberChange::kLeft};
  }
  report(worker, change);
}

void Membership::onActivity(const WorkerInfo& worker, uint64_t incarnation) {
  {
    MutexLock lock(mutex_);
    const auto gone = gone_.find(worker.id);
    if (gone == gone_.end() || gone->second.incarnation != incarnation || gone->second.has_left) return;
    gone_.erase(gone);
  }
  report(worker, MemberChange::kJoined);
}

std::vector<WorkerInfo> Membership::living(std::vector<WorkerInfo> workers) const {
  MutexLock lock(mutex_);
  std::erase_if(
      workers, [this](const WorkerInfo& worker) TORCHRPC_REQUIRES(mutex_) { return gone_.contains(worker.id); });
  return workers;
}

void Membership::report(const WorkerInfo& worker, MemberChange change) {
  std::vector<Handler> handlers;
  {
    MutexLock lock(mutex_);
    handlers = handlers_;
  }
  if (handlers.empty()) return;
  strand_.post([handlers = std::move(handlers), worker, change] {
    for (const auto& handler : handlers) handler(worker, change);
  });
}

}  // namespace torchrpc
