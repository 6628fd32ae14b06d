#pragma once

// The owner's half of the RRef protocol: which values of this node are held, by which forks, on which workers. The
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
  /// An entry that has ended. `failure`: no call will ever make its value, and its waiters must get this error.
  struct Ended {
    std::shared_ptr<OwnerRRef> rref;
    Status failure;
  };
  using EndedList = std::vector<Ended>;

  /// Of a message.
  struct Sender {
    WorkerId worker = kNoWorker;
    uint64_t incarnation = 0;
  };
  struct Holder {
    WorkerId worker = kNoWorker;
    uint64_t registration = kNoNumber;
  };
  struct Entry {
    std::shared_ptr<OwnerRRef> rref;
    uint64_t expected = kNoNumber;      ///< the call that will make the value, until it arrives
    WorkerId expected_for = kNoWorker;  ///< the worker whose message made the entry before the call has arrived
    std::map<ForkId, Holder> forks;
  };
  /// The most entries that a worker can make for calls that have not arrived: more than it has calls under way. It is a
  /// bound on what a worker can make us keep with ids that no call will ever bring.
  static constexpr size_t kMostExpected = size_t{1} << 15;

  explicit OwnerTable(std::shared_ptr<const GroupMember> self) : self_(std::move(self)) {}

  /// Adds a fork that the owner makes; `holder` may be kNoWorker.
  void addFork(const std::shared_ptr<OwnerRRef>& rref, const ForkId& fork, WorkerId holder);

  /// For remote() to this worker: the call that is about to be sent will find `rref`.
  void expect(const std::shared_ptr<OwnerRRef>& rref, const RemoteResult& call);

  /// A remote call has arrived. `created`: the function must run, and its result becomes the value of `rref`. Otherwise
  /// the call has arrived before or was cancelled; `rref` may then be in no table.
  struct Hosted {
    std::shared_ptr<OwnerRRef> rref;
    bool created = false;
  };
  Hosted host(const Sender& creator, const RemoteResult& call);

  /// Registers a holder's fork: who knows the ids of an RRef has been given a fork of it. Fails with kRRefDeleted if
  /// the value has been dropped, if another worker holds that fork, and if there has never been such an RRef.
  Status registerFork(const Sender& holder, const ForkRequest& request);

  /// Removes forks that their holder has dropped. Those of other holders stay.
  Status removeForks(const Sender& holder, const std::vector<UserDelete>& deletions, EndedList& ended);
  /// Removes a fork that this owner has made and that nobody will get.
  void abandonFork(const RRefId& rref, const ForkId& fork, EndedList& ended);

  /// The owner's own RRef, for a fork that has arrived at the owner; removes the fork.
  Result<std::shared_ptr<OwnerRRef>> adopt(const RRefFork& fork, EndedList& ended);

  /// The RRef that a worker asks for by its fork, which is registered if its request has not arrived yet. The call that
  /// makes the value may be still to come. Fails as registerFork().
  Result<std::shared_ptr<OwnerRRef>> find(const Sender& holder, const Fetch& request);

  /// Removes the forks that a lost worker held and cancels its calls; messages of it that still arrive are refused.
  EndedList loseWorker(WorkerId worker);
  /// A worker has joined, whose registration numbers begin at its incarnation. What its earlier incarnations held is
  /// removed, and their messages are refused. Has an effect once.
  EndedList onWorkerJoined(WorkerId worker, uint64_t incarnation);

  /// Waits until no entry is left; false if `deadline` passes first.
  bool waitEmpty(TimePoint deadline);

  /// Empties the table and returns its entries.
  std::vector<Entry> clear();

  /// Adds the workers that hold forks.
  void addHolders(std::set<WorkerId>& workers) const;

  /// What can be seen of a value.
  struct Row {
    std::shared_ptr<OwnerRRef> rref;
    std::vector<WorkerId> holders{};
  };
  /// All values, or `most` of them, the oldest first.
  std::vector<Row> rows(size_t most) const;

  struct Counts {
    size_t rrefs = 0;
    size_t forks = 0;
    size_t runs = 0;  ///< of registration numbers
  };
  Counts counts() const;

 private:
  struct Peer {
    uint64_t incarnation = 0;
    SeenNumbers registrations;
    bool lost = false;
    size_t expected = 0;  ///< entries with this worker as `expected_for`, whichever its incarnation
  };
  using Entries = std::map<RRefId, Entry>;

  /// The entry of `rref`, made for `asker` if its call is still to come. Fails with kRRefDeleted if the value was
  /// dropped or will never be made.
  Result<Entries::iterator> findOrExpect(const RRefId& rref, uint64_t creation, WorkerId asker)
      TORCHRPC_REQUIRES(mutex_);
  /// Whether no call of that number will arrive (any more) that makes the value of `rref`.
  bool isPast(const RRefId& rref, uint64_t creation) const TORCHRPC_REQUIRES(mutex_);
  /// The entry expects no call any more.
  void stopExpecting(Entry& entry) TORCHRPC_REQUIRES(mutex_);
  // All changes of Entry::forks, so that they are counted.
  void setFork(Entry& entry, const ForkId& fork, const Holder& holder) TORCHRPC_REQUIRES(mutex_);
  void eraseFork(Entry& entry, std::map<ForkId, Holder>::iterator fork) TORCHRPC_REQUIRES(mutex_);
  /// Whether a worker may register this fork, or use it up.
  static bool mayHold(const Entry& entry, const ForkId& fork, WorkerId worker);
  Status registerLocked(const Sender& holder, const ForkRequest& request) TORCHRPC_REQUIRES(mutex_);
  void removeLocked(WorkerId holder, const UserDelete& deletion, EndedList& ended) TORCHRPC_REQUIRES(mutex_);
  bool isLost(const Sender& sender) TORCHRPC_REQUIRES(mutex_);
  /// Removes the forks that the worker holds, and cancels its calls.
  void dropHeldBy(WorkerId worker, EndedList& ended) TORCHRPC_REQUIRES(mutex_);
  /// The call that was to make the value will never run.
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
  std::map<WorkerId, Peer> peers_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
