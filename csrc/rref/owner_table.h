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
    uint64_t expected = kNoNumber;  ///< the call that will make the value, until it arrives
    std::map<ForkId, Holder> forks;
  };

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

  /// Registers a holder's fork. Fails with kRRefDeleted if the value has been dropped.
  Status registerFork(const Sender& holder, const ForkRequest& request);

  /// Removes a fork that its holder has dropped, or that was abandoned.
  void removeFork(const Sender& holder, const UserDelete& request, EndedList& ended);

  /// The owner's own RRef, for a fork that has arrived at the owner; removes the fork.
  Result<std::shared_ptr<OwnerRRef>> adopt(const RRefFork& fork, EndedList& ended);

  /// The RRef that a fetch asks for; the call that makes its value may be still to come.
  Result<std::shared_ptr<OwnerRRef>> find(const Fetch& request);

  /// Removes the forks that a lost worker held and cancels its calls; messages of it that still arrive are refused.
  EndedList loseWorker(WorkerId worker);
  /// A worker has joined, whose ids of RRefs begin at its incarnation. What its earlier incarnations held is removed,
  /// and their messages are refused. Has an effect once.
  EndedList onWorkerJoined(WorkerId worker, uint64_t incarnation);

  /// Waits until no entry is left; false if `deadline` passes first.
  bool waitEmpty(TimePoint deadline);

  /// Empties the table and returns its entries.
  std::vector<Entry> clear();

  /// Adds the workers that hold forks.
  void addHolders(std::set<WorkerId>& workers) const;

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
  };
  using Entries = std::map<RRefId, Entry>;

  /// The entry of `rref`, made if its call is still to come; end() if the value was dropped or will never be made.
  Entries::iterator findOrExpect(const RRefId& rref, uint64_t creation) TORCHRPC_REQUIRES(mutex_);
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
  std::map<WorkerId, Peer> peers_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
