#pragma once

// Lets the workers of a group learn of each other when they start, and wait for each other when they end, through
// c10d's Store. The methods block, so they belong to the thread that starts or ends the node.

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/timer.h"
#include "group/fan_in.h"
#include "peers/worker_directory.h"

namespace torchrpc {

/// The key of a group's state. The store has it once a static group has formed: first "1", then another text each
/// time that a worker has taken the place of a lost one. Of any group it is kEndedState when no worker can join any
/// more.
constexpr auto kStateKey = "formed";
constexpr auto kFormedState = "1";
constexpr auto kEndedState = "ended";

/// The part of a store that belongs to one group. Groups may use a store one after another.
struct GroupEntry {
  StorePtr store;
  int32_t number = 0;        ///< of the group, from 0
  bool takes_place = false;  ///< the group has formed, and this worker may take the place of one that was lost
};
/// Makes each later request to the store, and the end of its client, fail after this time at the latest: c10d's
/// FileStore waits for a file that was removed until its time-out.
void limitRequests(c10d::Store& store, Duration limit);

/// Returns the group that this worker enters, with at least the number `first`: the latest group that has formed, if it
/// has not ended and has the record of an earlier process for this rank; otherwise the first group that has not formed.
GroupEntry enterGroup(const StorePtr& root, WorkerId rank, int32_t first);
/// Returns the part of the group with that number.
StorePtr partOfGroup(const StorePtr& root, int32_t number);
/// Returns the part of the latest group that has formed; of the first one if none has.
StorePtr partOfLatestGroup(const StorePtr& root);
/// Marks the group of this part of the store as formed.
void markFormed(c10d::Store& store);
/// Whether no worker can join that group any more, or wait for it to form.
bool hasEnded(c10d::Store& store);

/// The methods throw Error(kRendezvous), which names the workers that are missing or in conflict and what to do;
/// releaseStore() and leaveGroup() do not. Timeouts: kNoLimit for none. Not thread-safe.
class Rendezvous {
 public:
  using LostAmong = FanIn::LostAmong;
  using AnyAlive = std::function<bool(const std::vector<WorkerRecord>&)>;

  /// `secret`: of the group; empty: the entries of other workers in the store are not authenticated.
  Rendezvous(StorePtr store, WorkerRecord self, const std::string& secret = "");

  /// Static group: publishes this worker and returns the records of all workers. Worker 0 collects the records and
  /// checks them: names must be unique, and world sizes must agree. All workers report the same conflict.
  std::vector<WorkerRecord> meetAll(Duration timeout);

  /// Static group that has formed: takes the place of an earlier, lost start of this worker, and returns the
  /// records of all workers. Returns nullopt if there is no such place, because the group has ended, its workers are
  /// not alive any more, or have other names; then another group forms. `any_alive` returns whether one of the workers
  /// answers.
  std::optional<std::vector<WorkerRecord>> takePlace(Duration timeout, const AnyAlive& any_alive);
  /// Returns the incarnation in the record of this worker's place; 0 if the store has no such record.
  uint64_t incarnationInPlace();
  /// Marks the group as ended, so that no worker can join it any more.
  void markEnded();
  /// Static group: tells the other workers that this one leaves before them, and is not lost.
  void markLeft(Duration timeout);
  /// Whether that peer has called markLeft(). Returns false if the store does not answer.
  bool hasLeft(const PeerId& peer);
  /// Whether any worker of the group has called markLeft(), by one request. Returns false if the store does not answer.
  bool hasAnyLeft();
  /// Returns the entries that the store has of the group, with these records of its workers, for a StoreKeeper. To be
  /// called after meetAll() or takePlace(). `stored_secret`: the value of the secret's key. Thread-safe.
  std::vector<std::pair<std::string, std::vector<uint8_t>>> entries(
      const std::vector<WorkerRecord>& records, const std::string& stored_secret) const;
  /// The entry of this worker among them.
  std::pair<std::string, std::vector<uint8_t>> ownEntry() const;
  /// Whether the store can still be read.
  bool storeAnswers() const;
  /// Uses that store for the group from now on.
  void setStore(const StorePtr& store);
  /// The address of the store, for the texts of errors; empty if rank 0 does not serve it.
  void setServedAt(std::optional<StoreAddress> served) { fan_in_.setServedAt(std::move(served)); }

  /// Group that grows: publishes this worker, and returns the records of the members. The caller makes sure that one
  /// worker joins at a time. This worker replaces members that have its name or its id and are no longer alive
  /// (`any_alive`).
  std::vector<WorkerRecord> joinGroup(Duration timeout, const AnyAlive& any_alive);
  /// The last member that leaves ends the group.
  void leaveGroup(Duration timeout);
  /// The record of a member that has joined.
  WorkerRecord lookUp(WorkerId id, Duration timeout);

  /// Returns the records of the group of this part of a store, for observers; of a static group, once it has formed.
  static std::vector<WorkerRecord> recordsIn(const StorePtr& part, const std::string& secret);

  /// A barrier that sums: blocks until all workers of a static group have called it with this `name`, and returns the
  /// sum of their numbers, which is the same on all. It neither waits for the workers in `absent` nor counts them. It
  /// adds to `absent` the workers that `lost` (empty: none) reports meanwhile, here or on the worker that sums.
  int64_t sumOverAll(
      const std::string& name, int64_t number, Duration timeout, const LostAmong& lost, std::set<WorkerId>& absent);

  /// Publishes that this worker has read all that it needs of one `phase` (a name that is used once). Worker 0, whose
  /// process often serves the store and may end next, waits until all workers but those in `absent` have published
  /// that, for `timeout` at most. The others do not wait.
  void releaseStore(const std::string& phase, Duration timeout, const std::set<WorkerId>& absent = {});

 private:
  /// The result that worker 0 publishes of a static group: the records of all in the order of their ranks, or the
  /// conflict.
  struct Roster {
    std::vector<std::string> records{};
    std::string conflict{};

    std::string encode() const;
    /// Throws Error: kProtocol, kRendezvous.
    static Roster decode(std::string_view bytes);
  };
  Roster collectRecords(TimePoint deadline);
  FanIn::Wait waitToJoin(TimePoint deadline);
  /// Accepts values in the store from now on only if they are of the group with this roster.
  void bindTo(const Roster& roster);
  /// Returns the current records of all workers of a static group that has formed, with those that have replaced lost
  /// ones. To be called before bindTo().
  std::vector<WorkerRecord> latestRecords();
  /// Returns why these cannot be the records of this worker's group; empty if they are.
  std::string conflictWith(const std::vector<std::string>& records) const;
  std::string sizesDiffer(const WorkerRecord& other) const;
  /// Waits for the workers of these ranks. Returns, encoded, the sum of their numbers and all ranks that are not in it.
  std::string sumOfArrivals(const std::string& name, std::vector<WorkerId> ranks, const FanIn::Wait& wait);
  void claimKindOfGroup();
  void claimRank();
  /// The state of the group in the store; "" if the group has not formed.
  std::string state();
  /// Replaces the state `from` by `to`. Returns false if the state is not `from` any more.
  bool changeState(const std::string& from, const std::string& to);
  Error placeTakenError(const WorkerRecord& by) const;
  /// Decodes the record that is `stored` for that worker. Throws Error: kRendezvous if it is another worker's record,
  /// kProtocol if it is malformed.
  static WorkerRecord openRecord(WorkerId id, const std::string& stored);
  /// The members of a group that grows.
  std::vector<WorkerId> readMembers();
  void writeMembers(const std::vector<WorkerId>& members);

  StorePtr store_;
  const WorkerRecord self_;
  const StoreSeal seal_;  ///< of the values that are written before the group has formed
  FanIn fan_in_;
  std::string roster_;  ///< encoded; set by meetAll() and takePlace()
};

}  // namespace torchrpc
