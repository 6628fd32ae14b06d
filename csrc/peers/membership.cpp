#include "peers/membership.h"

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

void Membership::onJoined(const Peer& peer, bool is_replaced) {
  bool must_post = false;
  {
    MutexLock lock(mutex_);
    const auto [known, is_new] = members_.try_emplace(peer.id);
    auto& member = known->second;
    // A worker may be announced twice.
    if (!is_new && member.latest >= peer.peerId() && member.state == State::kPresent) return;
    member = {peer.peerId(), State::kPresent};
    must_post = enqueue(peer, is_replaced ? MemberChange::kReplaced : MemberChange::kJoined);
  }
  if (must_post) post();
}

void Membership::onGone(const Peer& peer, MemberChange change) {
  bool must_post = false;
  {
    MutexLock lock(mutex_);
    auto& member = members_[peer.id];
    const bool is_known = member.state != State::kPresent && member.latest == peer.peerId();
    if (is_known || member.latest > peer.peerId()) return;
    member = {peer.peerId(), change == MemberChange::kLeft ? State::kLeft : State::kLost};
    must_post = enqueue(peer, change);
  }
  if (must_post) post();
}

void Membership::onActivity(const Peer& peer) {
  bool must_post = false;
  {
    MutexLock lock(mutex_);
    const auto known = members_.find(peer.id);
    if (known == members_.end()) return;
    auto& member = known->second;
    if (member.latest != peer.peerId() || member.state != State::kLost) return;
    member.state = State::kPresent;
    must_post = enqueue(peer, MemberChange::kJoined);
  }
  if (must_post) post();
}

std::vector<WorkerInfo> Membership::living(std::vector<WorkerInfo> workers) const {
  MutexLock lock(mutex_);
  std::erase_if(workers, [this](const WorkerInfo& worker) TORCHRPC_REQUIRES(mutex_) {
    const auto known = members_.find(worker.id);
    return known != members_.end() && known->second.state != State::kPresent;
  });
  return workers;
}

bool Membership::enqueue(const WorkerInfo& worker, MemberChange change) {
  if (handlers_.empty()) return false;
  queue_.push_back({worker, change});
  return !std::exchange(is_reporting_, true);
}

void Membership::post() {
  pool_.post([this] { reportQueued(); });
}

void Membership::reportQueued() {
  for (;;) {
    std::vector<Handler> handlers;
    Change next;
    {
      MutexLock lock(mutex_);
      if (queue_.empty()) {
        is_reporting_ = false;
        return;
      }
      next = std::move(queue_.front());
      queue_.pop_front();
      handlers = handlers_;
    }
    for (const auto& handler : handlers) handler(next.worker, next.change);
  }
}

}  // namespace torchrpc
