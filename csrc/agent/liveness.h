#pragma once

// Notices workers that are silent: stopped, cut off, on a machine without power. Their connections do not end by
// themselves. Links to workers of whom something is awaited are pinged when nothing has come for a while; one that
// stays silent is ended, which then is a lost worker like any other. Nothing is done for workers of whom nothing is
// awaited, and nothing at all while that is so of all.
// It counts looks and not seconds: a process that was stopped itself does not take the others for dead when it goes on.
// Threads: the timer's looks; public methods from any.

#include <atomic>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "agent/connection_pool.h"
#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

/// What TORCHRPC_LIVENESS_TIMEOUT says (seconds, 0: never), or 30 s. Throws Error(kInvalidArgument) if it says
/// something else.
Duration defaultLivenessTimeout();

class Liveness {
 public:
  using Awaited = std::function<void(std::set<WorkerId>&)>;

  /// `timeout` 0: nobody is ever found silent. The others must outlive it; after the timer's close() it does nothing.
  Liveness(Duration timeout, Timer& timer, ConnectionPool& connections);

  /// Registers who adds the workers of whom something is awaited; before the first wake().
  void addSource(Awaited source) { sources_.push_back(std::move(source)); }
  /// Something may be awaited from now on. Cheap.
  void wake() {
    if (!looking_.load()) begin();
  }

  /// A worker's connection has ended; something has come from one.
  void onLost(WorkerId worker);
  void onHeard(WorkerId worker);
  /// Whether a worker was ended for being silent, and nothing has come from it since.
  bool silent(WorkerId worker) const;
  /// Which of these have been lost for a moment and not come back. Who asks waits for them: for some time from now
  /// something is awaited of them, and a connection is opened to those that have none.
  std::vector<WorkerId> lostAmong(const std::vector<WorkerId>& workers);

 private:
  struct Loss {
    TimePoint since;
    bool silent = false;
  };
  void begin();
  void look();
  std::set<WorkerId> awaited();
  void probe(WorkerId worker);

  // Constant after construction.
  const Duration pause_;  ///< between looks
  const Duration timeout_;
  Timer& timer_;
  ConnectionPool& connections_;
  std::vector<Awaited> sources_;

  std::atomic<bool> looking_;
  // one look at a time:
  std::map<uint64_t, int> silences_;  ///< by link: how many looks have found it silent

  mutable Mutex mutex_;
  // guarded by mutex_:
  std::map<WorkerId, Loss> lost_;
  std::map<WorkerId, TimePoint> asked_;  ///< until when they are awaited
};

}  // namespace torchrpc
