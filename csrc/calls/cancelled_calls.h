#pragma once

// The calls served here whose callers do not want their results any more, because they have cancelled the calls or are
// lost. A call has an entry only if its caller has cancelled it or a handler is registered for it. Other calls cost one
// load.
// Threads: any. Handlers are called under no lock, often on the loop.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "base/sync/mutex.h"
#include "calls/current_call.h"

namespace torchrpc {

/// What a caller that does not wait any more wants of its call.
enum class CancelKind : uint8_t {
  kStop = 0,     ///< that the function ends as soon as it can, and the calls that it has made
  kAbandon = 1,  ///< nothing: the function goes on, but nobody takes its result
};

class CancelledCalls {
 public:
  using Handler = std::function<void()>;
  /// The limit on entries. Beyond it, cancel() removes the oldest entry of the same link that has no handlers.
  static constexpr size_t kMost = 4096;

  /// Marks a call, which has not been answered, as cancelled or abandoned by its caller, and calls its handlers of that
  /// kind. To cancel includes to abandon.
  void cancel(ServedId id, CancelKind kind = CancelKind::kStop);
  /// Calls the handlers of the calls that have arrived over a link that has ended, and removes their entries.
  void loseLink(uint64_t link);
  /// Has `handler` called if the call is cancelled before it is answered; with kAbandon, also if it is abandoned.
  /// Returns false, and does not call it, if that has happened already.
  bool onCancelled(ServedId id, Handler handler, CancelKind kind = CancelKind::kStop);
  bool isCancelled(ServedId id) const;
  /// Removes the entry of a call that has been answered.
  void onAnswered(ServedId id);

  size_t size() const { return size_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    bool is_cancelled = false;
    bool is_abandoned = false;
    std::vector<Handler> handlers{};          ///< of kStop
    std::vector<Handler> abandon_handlers{};  ///< of kAbandon

    bool hasHandlers() const { return !handlers.empty() || !abandon_handlers.empty(); }
  };
  void makeRoom(uint64_t link) TORCHRPC_REQUIRES(mutex_);
  void updateSize() TORCHRPC_REQUIRES(mutex_) { size_.store(entries_.size()); }

  std::atomic<size_t> size_{0};
  mutable Mutex mutex_;
  std::map<ServedId, Entry> entries_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
