#pragma once

// The calls that this worker serves and whose callers do not want their results any more: they have cancelled them, or
// are lost. Only calls about which somebody has said or asked something have an entry, so others cost one load.
// Threads: any. Handlers are called under no lock, often on the loop.

#include <atomic>
#include <compare>
#include <functional>
#include <map>
#include <vector>

#include "base/ids.h"
#include "base/sync/mutex.h"

namespace torchrpc {

/// A request that this worker serves.
struct ServedId {
  uint64_t link = 0;  ///< over which it has come; 0: from this worker itself
  CallId call = 0;    ///< 0: a request that nobody can cancel

  friend auto operator<=>(const ServedId&, const ServedId&) = default;
};

class CancelledCalls {
 public:
  using Handler = std::function<void()>;
  /// The entries that peers can make without handlers of this worker; then the oldest of the same link goes.
  static constexpr size_t kMost = 4096;

  /// The caller has cancelled the call, which has not been answered.
  void cancel(ServedId id);
  /// The link has ended: calls the handlers of those that have come over it.
  void loseLink(uint64_t link);
  /// Calls `handler` if the call is cancelled before it is answered; at once, if it is cancelled already.
  void onCancelled(ServedId id, Handler handler);
  bool isCancelled(ServedId id) const;
  /// The call has been answered, so nobody will ask for it again.
  void onAnswered(ServedId id);

  size_t size() const { return size_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    bool is_cancelled = false;
    std::vector<Handler> handlers{};
  };
  void makeRoom(uint64_t link) TORCHRPC_REQUIRES(mutex_);
  void updateSize() TORCHRPC_REQUIRES(mutex_) { size_.store(entries_.size()); }

  std::atomic<size_t> size_{0};
  mutable Mutex mutex_;
  std::map<ServedId, Entry> entries_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
