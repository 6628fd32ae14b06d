#pragma once

// Liveness: detection of silent workers (stopped processes, broken networks, machines without power), whose connections
// do not close by themselves. Workers with outstanding requests are pinged when nothing has arrived from them for a
// while. The link to one that stays silent is closed, which makes it a lost worker like any other. Workers without
// outstanding requests are left alone, and while there are no such requests there is no timer.
// Liveness counts poll rounds instead of seconds, so a process that was stopped (SIGSTOP) does not expire its peers
// when it resumes. A round begins when the loop has read what had arrived, so a process that gets no time to read does
// not expire them, either. Threads: the timer's or the loop for poll rounds; public methods from any.

#include <atomic>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "base/sync/mutex.h"
#include "base/timer.h"
#include "peers/connection_pool.h"
#include "peers/link_prober.h"

namespace torchrpc {

/// The value of TORCHRPC_LIVENESS_TIMEOUT (seconds, 0: no limit), or 30 s. Throws Error(kInvalidArgument) if it is not
/// a number of seconds.
Duration defaultLivenessTimeout();

class Liveness {
 public:
  /// Adds workers with outstanding requests.
  using Source = std::function<void(std::set<WorkerId>&)>;

  /// `timeout`: kNoLimit: no worker is ever found silent. The timer and the pool must outlive this object, which does
  /// nothing after the timer's close().
  Liveness(WorkerId self, Duration timeout, Timer& timer, ConnectionPool& connections);

  /// To be called before the first onRequest().
  void addSource(Source source) { sources_.push_back(std::move(source)); }
  /// Called when there may be a new outstanding request. Cheap.
  void onRequest() {
    if (!round_scheduled_.load()) scheduleRound();
  }

  /// Called when the link to a worker has ended. `is_replaced`: it led to an earlier start of the worker than the
  /// latest known one.
  void onClosed(const Link& link, bool is_replaced);
  /// Called when a frame has arrived from a worker.
  void onActivity(const Link& link);
  /// Called when the worker has joined again.
  void onReplaced(WorkerId worker);
  /// Whether a worker's link was closed because it was silent, and no frame has arrived from it since.
  bool isSilent(WorkerId worker) const;
  /// Returns those of the workers that have been lost for some time and could not be reached since. Because the caller
  /// waits for them, they count as workers with outstanding requests for a short time from now on, and the prober opens
  /// links to those that have none.
  std::vector<WorkerId> lostAmong(const std::vector<WorkerId>& workers);
  /// Opens links to those of the workers that have none, so that this node notices their ends.
  void watch(const std::vector<WorkerId>& workers) { prober_.probe(workers); }
  /// Opens no more links.
  void close() { prober_.close(); }

 private:
  struct Loss {
    TimePoint since;
    bool is_silent = false;
    bool is_confirmed = false;  ///< a probe has failed
  };
  void scheduleRound();
  void runRound();
  std::set<WorkerId> outstanding();
  /// Called when a probe of the worker has failed.
  void confirmLoss(WorkerId worker);

  // Constant after construction:
  const Duration timeout_;
  const Duration round_interval_;
  Timer& timer_;
  ConnectionPool& connections_;
  std::vector<Source> sources_;

  // Own synchronization:
  LinkProber prober_;
  std::atomic<bool> round_scheduled_;
  // Used by one poll round at a time:
  std::map<uint64_t, int> silent_rounds_;  ///< by link: the number of rounds in a row in which it was silent

  mutable Mutex mutex_;
  std::map<WorkerId, Loss> lost_ TORCHRPC_GUARDED_BY(mutex_);
  std::map<WorkerId, TimePoint> waited_for_until_ TORCHRPC_GUARDED_BY(mutex_);  ///< see lostAmong()
};

}  // namespace torchrpc
