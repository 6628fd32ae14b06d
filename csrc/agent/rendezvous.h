#pragma once

// How the workers of a group learn of each other when they start, and wait for each other when they end: through c10d's
// Store. Blocks, so it belongs to the thread that starts or ends the node.

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/fan_in.h"
#include "agent/worker_directory.h"
#include "base/timer.h"

namespace torchrpc {

/// The key of a static group's state. The store has it once the group has formed: "1", then another text with each
/// worker that has taken the place of a lost one; kEndedState when nobody can join any more.
constexpr auto kStateKey = "formed";
constexpr auto kFormedState = "1";
constexpr auto kEndedState = "ended";

/// The part of a store that belongs to one group. Groups of a fixed size may use a store one after another.
struct GroupEntry {
  StorePtr store;
  int32_t number = 0;        ///< of the group, from 0
  bool takes_place = false;  ///< the group has formed, and this worker may take the place of one that was lost
};
/// The first group with at least the number `first` that has not formed or, if the latest one that has formed has not
/// ended and has the record of an earlier process for this rank, that one.
GroupEntry enterGroup(const StorePtr& root, WorkerId rank, int32_t first);
/// The part of the group with that number.
StorePtr partOfGroup(const StorePtr& root, int32_t number);
/// The part of the latest group that has formed; of the first one if none has.
StorePtr partOfLatestGroup(const StorePtr& root);
/// The group of this part of the store has formed.
void markFormed(c10d::Store& store);
/// Nobody can join that group any more, or wait for it to form.
bool hasEnded(c10d::Store& store);

/// Every method but releaseStore() and leaveGroup() throws Error(kRendezvous), with the workers that are missing or in
/// conflict and what to do. Timeouts: kNoLimit for none. Not thread-safe.
class Rendezvous {
 public:
  using LostAmong = FanIn::LostAmong;
  using AnyAlive = std::function<bool(const std::vector<WorkerRecord>&)>;

  /// `secret`: of the group; empty: what the others have written in the store is believed.
  Rendezvous(StorePtr store, WorkerRecord self, const std::string& secret = "");

  /// Static group: publishes this worker and returns the records of all, which worker 0 collects and checks: names must
  /// be unique, and world sizes agree. All workers report the same conflict.
  std::vector<WorkerRecord> meetAll(Duration timeout);

  /// Static group that has formed: takes the place of an earlier incarnation of this worker, which has been lost, and
  /// returns the records of all. Nothing if there is no such place: the group has ended, its workers are not alive any
  /// more, or have other names; then another group forms. `any_alive`: whether one of the workers answers.
  std::optional<std::vector<WorkerRecord>> takePlace(Duration timeout, const AnyAlive& any_alive);
  /// The incarnation of this worker that has the place now; 0: it has none.
  uint64_t incarnationInPlace();
  /// Static group: no worker can join it any more.
  void markEnded();
  /// Static group: tells the others that this worker leaves before them, and is not lost.
  void markLeft();
  /// Whether that incarnation of a worker has said so. Of a store that does not answer: no.
  bool hasLeft(WorkerId id, uint64_t incarnation);
  /// After meetAll() or takePlace(): what the store has of the group, with these records of its workers, for a
  /// StoreKeeper. `stored_secret`: the value of the secret's key. Thread-safe.
  std::vector<std::pair<std::string, std::vector<uint8_t>>> entries(
      const std::vector<WorkerRecord>& records, const std::string& stored_secret) const;
  /// The entry of this worker among them.
  std::pair<std::string, std::vector<uint8_t>> ownEntry() const;
  /// Whether the store can still be read.
  bool storeAnswers() const;
  /// From now on the group meets there.
  void setStore(const StorePtr& store);

  /// Group that grows: publishes this worker, reads the records of its members. The caller makes sure that one worker
  /// joins at a time. A member of the same name and id that is no longer alive (`any_alive`) is taken for an earlier
  /// start of this worker.
  std::vector<WorkerRecord> joinGroup(Duration timeout, const AnyAlive& any_alive);
  void leaveGroup();
  /// The record of a member that has joined.
  WorkerRecord lookUp(WorkerId id, Duration timeout);

  /// The workers of the group of a part of a store, for those who only look: of a static group once it has formed.
  static std::vector<WorkerRecord> recordsIn(const StorePtr& part, const std::string& secret);

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
  FanIn::Wait waitToJoin(TimePoint deadline);
  /// From now on values in the store count only if they are of the group with this roster.
  void bindTo(const Roster& roster);
  /// The records of all workers of a static group that has formed, with those of replaced ones. Before bindTo().
  std::vector<WorkerRecord> latestRecords();
  /// Why these cannot be the records of this worker's group; empty: they are.
  std::string conflictWith(const std::vector<std::string>& records) const;
  std::string sizesDiffer(const WorkerRecord& other) const;
  /// Waits for the workers of these ranks; returns the sum of their numbers, and all ranks that are not in it.
  std::string sumOfArrivals(const std::string& name, std::vector<WorkerId> ranks, const FanIn::Wait& wait);
  void claimKindOfGroup();
  void claimRank();
  /// What the store says of the group's state, "" if it has not formed.
  std::string state();
  /// False if the state is another one than `from` by now.
  bool changeState(const std::string& from, const std::string& to);
  Error placeTakenError(const WorkerRecord& by) const;
  /// The record that is `stored` for that worker. Throws Error(kRendezvous) if it is of another one, or not the
  /// group's.
  static WorkerRecord openRecord(WorkerId id, const std::string& stored);
  /// The members of a group that grows.
  std::vector<WorkerId> readMembers();
  void writeMembers(const std::vector<WorkerId>& members);

  StorePtr store_;
  const WorkerRecord self_;
  const StoreSeal seal_;  ///< of what is written before the group has formed
  FanIn fan_in_;
  std::string roster_;  ///< encoded; set by meetAll() and takePlace()
};

}  // namespace torchrpc
