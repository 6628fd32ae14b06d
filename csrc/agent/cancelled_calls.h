#pragma once

// The calls served here whose callers do not want their results any more, because they have cancelled the calls or are
// lost. A call has an entry only if its caller has cancelled it or a handler is registered for it. Other calls cost one
// load.
// Threads: any. Handlers are called under no lock, often on the loop.

#include <atomic>
#include <functional>
#include <map>
#include <vector>

#include "agent/current_call.h"
#include "base/sync/mutex.h"

namespace torchrpc {

class CancelledCalls {
 public:
  using Handler = std::function<void()>;
  /// The limit on entries. Beyond it, cancel() removes the oldest entry of the same link that has no handlers.
  static constexpr size_t kMost = 4096;

  /// Marks a call, which has not been answered, as cancelled by its caller, and calls its handlers.
  void cancel(ServedId id);
  /// Calls the handlers of the calls that have arrived over a link that has ended, and removes their entries.
  void loseLink(uint64_t link);
  /// Has `handler` called if the call is cancelled before it is answered. Returns false, and does not call it, if the
  /// call is cancelled already.
  bool onCancelled(ServedId id, Handler handler);
  bool isCancelled(ServedId id) const;
  /// Removes the entry of a call that has been answered.
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
