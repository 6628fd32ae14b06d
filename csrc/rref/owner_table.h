#pragma once

// What a node knows as an owner: which of its values are held, by which forks, on which workers. It decides when a
// value may go; the decisions are in wire/PROTOCOL.md, "RRefs". No messages are sent from here.
// Threads: any. Values are neither settled nor destroyed under its lock: what has ended is handed to the caller.

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "rref/fork_protocol.h"
#include "rref/rref.h"

namespace torchrpc {

class OwnerTable {
 public:
  /// An entry that has come to its end. `failure`: no call will ever make its value; whoever waits for it must hear so.
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
    uint64_t expected = kNoNumber;  ///< the call that will make the value, until it comes
    std::map<ForkId, Holder> forks;
  };

  explicit OwnerTable(WorkerInfo self) : self_(std::move(self)) {}

  /// A fork that the owner makes itself; `holder` may be kNoWorker.
  void addFork(const std::shared_ptr<OwnerRRef>& rref, const ForkId& fork, WorkerId holder);

  /// remote() to oneself: the call that is about to be sent will find `rref`.
  void expect(const std::shared_ptr<OwnerRRef>& rref, const RemoteResult& call);

  /// A remote call has arrived. `created`: the function is to run, and `rref` is where its result goes. Otherwise the
  /// call has been here before, or has been given up; `rref` may then be one that nobody else will ever see.
  struct Hosted {
    std::shared_ptr<OwnerRRef> rref;
    bool created = false;
  };
  Hosted host(WorkerId creator, const RemoteResult& call);

  /// A holder tells of its fork. kRRefDeleted if there is nothing to hold any more.
  Status registerFork(WorkerId holder, const ForkRequest& request);

  /// A holder has let go of its fork (or never had it: an abandoned one).
  void removeFork(WorkerId holder, const UserDelete& request, EndedList& ended);

  /// The owner's own RRef, for a fork that has come home; the fork itself has no more to do.
  Result<std::shared_ptr<OwnerRRef>> adopt(const RRefFork& fork, EndedList& ended);

  /// The RRef that a fetch asks for, which may be one whose call has not come yet.
  Result<std::shared_ptr<OwnerRRef>> find(const Fetch& request);

  /// A worker is gone, with the forks it held and the calls it had on their way; what still arrives from it counts
  /// for nothing.
  EndedList loseWorker(WorkerId worker);
  /// Another worker has joined under the id of a lost one.
  void welcome(WorkerId worker);

  /// Waits until no entry is left; false if `deadline` passes first.
  bool waitEmpty(TimePoint deadline);

  /// Empties the table; gives what was in it.
  std::vector<Entry> clear();

  /// Adds the workers that hold something.
  void addHolders(std::set<WorkerId>& workers) const;

  struct Counts {
    size_t rrefs = 0;
    size_t forks = 0;
    size_t runs = 0;  ///< of registration numbers
  };
  Counts counts() const;

 private:
  struct Peer {
    SeenNumbers registrations;
    bool lost = false;
  };
  using Entries = std::map<RRefId, Entry>;

  // All of these under mutex_:
  Entries::iterator locate(const RRefId& rref, uint64_t creation);
  void giveUp(Entry& entry, EndedList& ended);
  Entries::iterator dropIfUnheld(Entries::iterator it, EndedList& ended);
  Error gone(const RRefId& rref) const { return goneError(rref, self_); }

  // constant:
  const WorkerInfo self_;

  mutable Mutex mutex_;
  CondVar emptied_;
  // guarded by mutex_:
  Entries entries_;
  std::map<WorkerId, Peer> peers_;
};

}  // namespace torchrpc
