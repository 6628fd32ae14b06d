#pragma once

// The deletions of RRefs that wait for their message. The first deletions are sent at once; those that follow while
// kMostMessages messages to an owner are unanswered wait, and go together. So a program that drops a million RRefs
// sends some thousand messages. A queue is that of one incarnation of the owner: a later one knows nothing of its
// RRefs. Threads: any.

#include <algorithm>
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
  struct To {
    WorkerId owner = kNoWorker;
    uint64_t incarnation = 0;
    friend auto operator<=>(const To&, const To&) = default;
  };
  /// The owner's loop serves a message of kMostDeletions in less than a millisecond.
  static constexpr size_t kMostMessages = 2;

  /// Returns what the caller must send now, as one message: nothing, if the deletion waits.
  Deletions add(const To& to, const UserDelete& deletion) {
    MutexLock lock(mutex_);
    auto& queue = queues_[to];
    if (queue.unanswered < kMostMessages) {
      ++queue.unanswered;
      return {deletion};
    }
    queue.waiting.push_back(deletion);
    return {};
  }

  /// A message has been answered. Returns what the caller must send next, as one message: nothing, if nothing waits.
  Deletions takeNext(const To& to) {
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
    return next;
  }

  /// The owner is lost: nothing to it is sent any more.
  void drop(const To& to) {
    MutexLock lock(mutex_);
    const auto found = queues_.find(to);
    if (found == queues_.end()) return;
    found->second.waiting.clear();
    if (--found->second.unanswered == 0) queues_.erase(found);
  }

  size_t waiting() const {
    MutexLock lock(mutex_);
    size_t count = 0;
    for (const auto& [to, queue] : queues_) count += queue.waiting.size();
    return count;
  }

 private:
  struct Queue {
    size_t unanswered = 0;  ///< messages
    std::deque<UserDelete> waiting{};
  };

  mutable Mutex mutex_;
  std::map<To, Queue> queues_ TORCHRPC_GUARDED_BY(mutex_);  ///< each with unanswered messages
};

}  // namespace torchrpc
