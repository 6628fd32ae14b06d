#pragma once

// Finds out whether workers without a link can be reached: opens a link to each, over which it sends a PING. One prober
// does that for all threads of a node that wait for workers. It opens few links at a time, and the other workers wait
// in a queue, because all members of a group may begin to wait at once, and each dials all others.
// Threads: any.

#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "base/sync/mutex.h"
#include "peers/connection_pool.h"

namespace torchrpc {

/// How many links a node opens at a time to workers that it waits for.
constexpr size_t kMaxOpenProbes = 8;

class LinkProber {
 public:
  /// The pool must outlive this object. `on_failed` is called when the link of a probe has ended before anything
  /// arrived over it, and for workers that are not in the group any more. Any thread, without a lock.
  LinkProber(WorkerId self, ConnectionPool& connections, std::function<void(WorkerId)> on_failed)
      : self_(self), connections_(connections), on_failed_(std::move(on_failed)) {}

  /// Probes those of the workers that have no link and are not being probed yet. The first are those whose ids follow
  /// that of this worker, so that the members of a group do not all dial the same ones first.
  void probe(std::vector<WorkerId> workers);
  /// Probes no more workers.
  void close();

  /// Called when a frame has arrived over the link.
  void onActivity(const Link& link) { end(link, /*has_failed=*/false); }
  /// Called when the link has ended. `is_lost`: its worker may be lost, and has not been started again.
  void onClosed(const Link& link, bool is_lost) { end(link, /*has_failed=*/is_lost); }
  /// Called when nothing has arrived over the link for a while. If the link belongs to a probe, other probes do not
  /// wait for it: dialling a worker that does not answer costs no other worker anything, and Liveness decides when it
  /// is lost.
  void onSilent(const Link& link);

 private:
  struct Probe {
    uint64_t link = 0;  ///< the id of the link; 0 while it is being made
    bool is_silent = false;
  };

  /// Opens queued probes while not too many are open.
  void openQueued();
  /// Takes the next worker to probe out of the queue. Returns kNoWorker if there is none: then this thread has left
  /// openQueued().
  WorkerId takeNext();
  void open(WorkerId worker);
  void end(const Link& link, bool has_failed);
  /// Removes the probe of a worker that needs no link, or to which there can be none.
  void remove(WorkerId worker);

  // Constant after construction:
  const WorkerId self_;
  ConnectionPool& connections_;
  const std::function<void(WorkerId)> on_failed_;
  // Guarded by mutex_:
  Mutex mutex_;
  std::deque<WorkerId> queue_ TORCHRPC_GUARDED_BY(mutex_);
  std::map<WorkerId, Probe> open_ TORCHRPC_GUARDED_BY(mutex_);
  bool is_opening_ TORCHRPC_GUARDED_BY(mutex_) = false;  ///< a thread is in openQueued()
  bool is_closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

}  // namespace torchrpc
