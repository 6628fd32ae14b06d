#pragma once

// The owner's half of the RRef protocol: the values of this node, with their forks and the workers that hold these. The
// table decides when a value may be dropped, by the rules in wire/PROTOCOL.md, "RRefs". It sends no messages.
// Threads: any. No value is settled or destroyed under the lock: entries that have ended are returned to the caller.

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "rref/fork_protocol.h"
#include "rref/rref.h"
#include "rref/worker_counts.h"

namespace torchrpc {

class OwnerTable {
 public:
  /// An entry that has been dropped or, with `failure`, whose value no call will ever make: the caller must set this
  /// error for its waiters.
  struct Ended {
    std::shared_ptr<OwnerRRef> rref;
    Status failure;
  };
  using EndedList = std::vector<Ended>;

  struct Holder {
    WorkerId worker = kNoWorker;
    uint64_t registration = kNoNumber;
  };
  struct Entry {
    std::shared_ptr<OwnerRRef> rref;
    uint64_t expected = kNoNumber;  ///< the call that will make the value, until it arrives
    /// Before the call arrives: its creator, if that has asked for the value, else the worker whose message has made
    /// the entry; kNoWorker for a call of this worker to itself.
    WorkerId expected_for = kNoWorker;
    std::map<ForkId, Holder> forks;
  };
  /// The limit on entries that one worker can make for calls that have not arrived; larger than the number of its
  /// outstanding calls. It bounds the memory that a worker can use here with ids for which no call will ever arrive.
  static constexpr size_t kMostExpected = size_t{1} << 15;

  /// The limit on forks that one worker can hold by its own messages, whatever the number of values; larger than the
  /// number of RRefs of a program. It bounds the memory that a worker can use here with forks of one value.
  static constexpr size_t kMostForks = size_t{1} << 20;

  explicit OwnerTable(std::shared_ptr<const GroupMember> self) : self_(std::move(self)) {}

  /// Adds a fork that the owner makes; `holder` is kNoWorker if the receiver is unknown. Throws Error(kQuotaExceeded)
  /// beyond kMostForks.
  void addFork(const std::shared_ptr<OwnerRRef>& rref, const ForkId& fork, WorkerId holder);

  /// For remote() to this worker: adds an entry with `rref` for the call that is about to be sent.
  void expect(const std::shared_ptr<OwnerRRef>& rref, const RemoteResult& call);

  /// A remote call has arrived. `created`: the function must run, and its result becomes the value of `rref`. Otherwise
  /// the call has arrived before or was cancelled; `rref` may then be in no table.
  struct Hosted {
    std::shared_ptr<OwnerRRef> rref;
    bool created = false;
  };
  Hosted host(const PeerId& creator, const RemoteResult& call);

  /// Registers a holder's fork. Ids are secret, so a worker that knows the id of an RRef has received a fork of it.
  /// Fails with kRRefDeleted if the value has been dropped, if another worker holds that fork, or if there has never
  /// been such an RRef.
  Status registerFork(const PeerId& holder, const ForkRequest& request);

  /// Removes forks that `holder` has dropped. Forks of other holders stay.
  Status removeForks(const PeerId& holder, const std::vector<UserDelete>& deletions, EndedList& ended);
  /// Removes a fork that this owner has made and that no worker will receive.
  void abandonFork(const RRefId& rref, const ForkId& fork, EndedList& ended);

  /// Returns the owner's own RRef for a fork that has arrived at the owner. Removes the fork if the owner
  /// made it for itself or for an unknown receiver.
  Result<std::shared_ptr<OwnerRRef>> adopt(const RRefFork& fork, EndedList& ended);

  /// Returns the RRef for which a holder asks by its fork. Registers the fork if its own request has not arrived yet.
  /// The call that makes the value may still be to come. Fails as registerFork().
  Result<std::shared_ptr<OwnerRRef>> find(const PeerId& holder, const Fetch& request);

  /// Removes the forks that a lost worker held and cancels its calls. Its messages are refused from now on.
  EndedList loseWorker(WorkerId worker);
  /// A worker has joined; the number of its start is less than its registration numbers. Removes the forks and cancels
  /// the calls of its earlier starts; their messages are refused from now on. Has an effect once.
  EndedList onWorkerJoined(const PeerId& joined);

  /// Waits until no entry is left. Returns false if `deadline` passes first.
  bool waitEmpty(TimePoint deadline);

  /// Empties the table and returns its entries.
  std::vector<Entry> clear();

  /// Adds the workers that hold forks.
  void addHolders(std::set<WorkerId>& workers) const;

  /// A value and the holders of its forks.
  struct Row {
    std::shared_ptr<OwnerRRef> rref;
    std::vector<WorkerId> holders{};
  };
  /// At most `most` values, in the order of their ids.
  std::vector<Row> rows(size_t most) const;

  struct Counts {
    size_t rrefs = 0;
    size_t forks = 0;
    size_t runs = 0;  ///< of registration numbers
  };
  Counts counts() const;

 private:
  struct Worker {
    PeerId latest{};
    SeenNumbers registrations;
    bool lost = false;
    size_t expected = 0;  ///< entries with this worker as `expected_for`, of all its starts
  };
  using Entries = std::map<RRefId, Entry>;

  /// Returns the entry of `rref`; makes one for `asker` if the call may still arrive. Fails with kRRefDeleted if the
  /// value was dropped or will never be made, with kProtocol beyond kMostExpected.
  Result<Entries::iterator> findOrExpect(const RRefId& rref, uint64_t creation, WorkerId asker)
      TORCHRPC_REQUIRES(mutex_);
  /// From now on the entry, whose call has not arrived, counts as one for which this worker has asked. Fails with
  /// kProtocol beyond kMostExpected.
  Status expectFor(WorkerId asker, Entry& entry) TORCHRPC_REQUIRES(mutex_);
  /// Whether no call of that number can arrive any more to make the value of `rref`.
  bool isPast(const RRefId& rref, uint64_t creation) const TORCHRPC_REQUIRES(mutex_);
  /// From now on the entry expects no call.
  void stopExpecting(Entry& entry) TORCHRPC_REQUIRES(mutex_);
  /// Whether only this worker, and not the creator, has asked for the entry, and does so no more. If the call still
  /// arrives, it makes a new one. So an id that another worker has made up, and that this one has passed on in good
  /// faith, costs it nothing.
  static bool isGivenUp(const Entry& entry, WorkerId worker);
  // All changes of Entry::forks use these two functions, which keep forks_held_ correct.
  void setFork(Entry& entry, const ForkId& fork, const Holder& holder) TORCHRPC_REQUIRES(mutex_);
  void eraseFork(Entry& entry, std::map<ForkId, Holder>::iterator fork) TORCHRPC_REQUIRES(mutex_);
  /// Whether a worker may register or delete this fork: no other worker holds it.
  static bool mayHold(const Entry& entry, const ForkId& fork, WorkerId worker);
  /// The error of a worker that holds kMostForks forks; nullopt for others.
  Status checkForks(WorkerId holder) const TORCHRPC_REQUIRES(mutex_);
  Status registerLocked(const PeerId& holder, const ForkRequest& request) TORCHRPC_REQUIRES(mutex_);
  void removeLocked(WorkerId holder, const UserDelete& deletion, EndedList& ended) TORCHRPC_REQUIRES(mutex_);
  bool isLost(const PeerId& sender) TORCHRPC_REQUIRES(mutex_);
  /// Removes the forks that the worker holds, and cancels the calls that are expected from it.
  void dropHeldBy(WorkerId worker, EndedList& ended) TORCHRPC_REQUIRES(mutex_);
  /// From now on the entry expects no call, and its waiters get an error: the call will never run.
  void cancelCreation(Entry& entry, EndedList& ended) TORCHRPC_REQUIRES(mutex_);
  /// Drops the entry if it has no fork and expects no call; returns the next one.
  Entries::iterator dropIfUnheld(Entries::iterator it, EndedList& ended) TORCHRPC_REQUIRES(mutex_);
  Error dropped(const RRefId& rref) const { return droppedError(rref, self_->self); }

  // constant:
  const std::shared_ptr<const GroupMember> self_;

  mutable Mutex mutex_;
  CondVar emptied_;
  Entries entries_ TORCHRPC_GUARDED_BY(mutex_);
  WorkerCounts forks_held_ TORCHRPC_GUARDED_BY(mutex_);
  std::map<WorkerId, Worker> workers_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
