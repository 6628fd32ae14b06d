#pragma once

// The requests whose handler has returned without an answer, for example because the function returns a future. For the
// inspection of a worker. Threads: any.

#include <vector>

#include "base/sync/mutex.h"
#include "calls/messenger.h"
#include "calls/thread_record.h"

namespace torchrpc {

class UnansweredCalls {
 public:
  /// Adds the request, unless it has been answered.
  void add(const ServedCall& call, const Responder& responder);
  std::vector<ServedCall> all() const;

 private:
  struct Entry {
    ServedCall call;
    Responder::Observer answer;
  };
  /// Removes the entries that have been answered.
  void prune() TORCHRPC_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::vector<Entry> entries_ TORCHRPC_GUARDED_BY(mutex_);
  size_t prune_at_ TORCHRPC_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchrpc
