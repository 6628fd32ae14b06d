#pragma once

// How the workers of a group learn of each other when they start, and wait for each other when they end: through c10d's
// Store. Blocks, so it belongs to the thread that starts or ends the node.

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "agent/fan_in.h"
#include "agent/worker_directory.h"
#include "base/timer.h"

namespace torchrpc {

/// Every method but releaseStore() and leaveGroup() throws Error(kRendezvous), with the workers that are missing or in
/// conflict and what to do. Timeouts: kNoLimit for none. Not thread-safe.
class Rendezvous {
 public:
  using LostAmong = FanIn::LostAmong;

  /// `secret`: of the group; empty: what the others have written in the store is believed.
  Rendezvous(StorePtr store, WorkerRecord self, const std::string& secret = "");

  /// Static group: publishes this worker and returns the records of all, which worker 0 collects and checks: names must
  /// be unique, and world sizes agree. All workers report the same conflict.
  std::vector<WorkerRecord> meetAll(Duration timeout);

  /// Group that grows: publishes this worker, reads the records of its members. The caller makes sure that one worker
  /// joins at a time. A member of the same name and id that is no longer alive (`is_alive`) is taken for an earlier
  /// start of this worker.
  std::vector<WorkerRecord> joinGroup(Duration timeout, const std::function<bool(const WorkerRecord&)>& is_alive);
  void leaveGroup();
  /// The record of a member that has joined.
  WorkerRecord lookUp(WorkerId id, Duration timeout);

  /// A barrier that sums: returns once all workers of a static group have called it with this `name`, with the sum of
  /// their numbers, the same on all. It neither waits for the workers in `absent` nor counts them, and adds to them
  /// those that `lost` reports meanwhile (empty: none) here or on the worker that sums.
  int64_t sumOverAll(
      const std::string& name, int64_t number, Duration timeout, const LostAmong& lost, std::set<WorkerId>& absent);

  /// Says that this worker has read all that it needs of one `phase` (a name that is used once). Worker 0, whose
  /// process often serves the store and may end next, waits until all have said so, or for `timeout`; the others do not
  /// wait.
  void releaseStore(const std::string& phase, Duration timeout);

 private:
  /// What worker 0 publishes of a static group: the records of all in the order of their ranks, or why there are none.
  struct Roster {
    std::vector<std::string> records{};
    std::string conflict{};

    std::string encode() const;
    /// Throws Error: kProtocol, kRendezvous.
    static Roster decode(std::string_view bytes);
  };
  Roster collectRecords(TimePoint deadline);
  /// Why these cannot be the records of this worker's group; empty: they are.
  std::string conflictWith(const std::vector<std::string>& records) const;
  std::string sizesDiffer(const WorkerRecord& other) const;
  /// Waits for the workers of these ranks; returns the sum of their numbers, and all ranks that are not in it.
  std::string sumOfArrivals(const std::string& name, std::vector<WorkerId> ranks, const FanIn::Wait& wait);
  void claimKindOfGroup();
  void claimRank();
  /// The record that is `stored` for that worker. Throws Error(kRendezvous) if it is of another one, or not the
  /// group's.
  static WorkerRecord openRecord(WorkerId id, const std::string& stored);
  /// The members of a group that grows.
  std::vector<WorkerId> readMembers();
  void writeMembers(const std::vector<WorkerId>& members);

  const StorePtr store_;
  const WorkerRecord self_;
  FanIn fan_in_;
};

}  // namespace torchrpc
