#pragma once

// The queues of RRef deletions (RREF_USER_DELETE), one for each owner. The first kMostMessages deletions are sent at
// once, each in a message of its own. While that many messages to the owner are unanswered, further deletions wait and
// are then sent together, so a program that drops a million RRefs sends some thousand messages. A queue belongs to one
// start of the owner, because a later one does not have these RRefs. Threads: any.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"
#include "rref/fork_protocol.h"

namespace torchrpc {

class DeletionQueues {
 public:
  using Deletions = std::vector<UserDelete>;
  /// The limit on unanswered messages. An owner's loop serves a message of kMostDeletions in less than a millisecond.
  static constexpr size_t kMostMessages = 2;

  /// Returns the deletions that the caller must send now, as one message; empty if the deletion waits.
  Deletions add(const PeerId& to, const UserDelete& deletion) {
    MutexLock lock(mutex_);
    auto& queue = queues_[to];
    if (queue.unanswered < kMostMessages) {
      ++queue.unanswered;
      return {deletion};
    }
    queue.waiting.push_back(deletion);
    ++waiting_;
    return {};
  }

  /// A message has been answered. Returns the deletions that the caller must send next, as one message; may be empty.
  Deletions takeNext(const PeerId& to) {
    MutexLock lock(mutex_);
    const auto found = queues_.find(to);
    if (found == queues_.end()) return {};
    auto& [unanswered, waiting] = found->second;
    const auto count = std::min(waiting.size(), kMostDeletions);
    if (count == 0) {
      if (--unanswered == 0) queues_.erase(found);
      return {};
    }
    const auto end = waiting.begin() + static_cast<ptrdiff_t>(count);
    Deletions next(waiting.begin(), end);
    waiting.erase(waiting.begin(), end);
    waiting_ -= count;
    return next;
  }

  /// Called in place of takeNext() if nothing more must be sent, for example because the owner is lost: drops the
  /// deletions that wait.
  void drop(const PeerId& to) {
    MutexLock lock(mutex_);
    const auto found = queues_.find(to);
    if (found == queues_.end()) return;
    waiting_ -= found->second.waiting.size();
    found->second.waiting.clear();
    if (--found->second.unanswered == 0) queues_.erase(found);
  }

  /// The deletions that wait until the owner answers earlier ones.
  size_t waitingFor(const PeerId& to) const {
    MutexLock lock(mutex_);
    const auto found = queues_.find(to);
    return found == queues_.end() ? 0 : found->second.waiting.size();
  }
  /// The deletions that wait for all owners. Cheap.
  size_t waiting() const { return waiting_.load(std::memory_order_relaxed); }

 private:
  struct Queue {
    size_t unanswered = 0;  ///< messages
    std::deque<UserDelete> waiting{};
  };

  std::atomic<size_t> waiting_{0};  ///< of all queues; changed under mutex_
  mutable Mutex mutex_;
  std::map<PeerId, Queue> queues_ TORCHRPC_GUARDED_BY(mutex_);  ///< only those with unanswered messages
};

}  // namespace torchrpc
