#pragma once

// What a node knows as a user: its live forks, those whose owner has not confirmed them yet (kept alive until then),
// and the parents of children in flight (kept alive until the child needs them no more). No messages are sent from
// here; the rules are in wire/PROTOCOL.md, "RRefs".
// Threads: any. UserRRefs are neither settled nor released under its lock.

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "rref/fork_protocol.h"
#include "rref/rref.h"

namespace torchrpc {

class UserTable {
 public:
  using User = std::shared_ptr<UserRRef>;

  explicit UserTable(std::weak_ptr<RRefService> service) : service_(std::move(service)) {}

  /// The user of a remote() about to be sent; pending until settled().
  User create(const RRefId& rref, const ForkId& fork, const WorkerInfo& owner);

  /// The user that a fork becomes on arrival; pending until settled(). A fork that comes again gives the user that it
  /// has become (`fresh` false), or kRRefDeleted if that one is gone.
  struct Adopted {
    User user;
    bool fresh = true;
  };
  Result<Adopted> adopt(const RRefFork& fork, const WorkerInfo& owner);

  /// The owner has confirmed it, or never will: it need not be kept alive any more.
  void settled(const UserRRef& user);
  /// Its last reference is gone.
  void remove(const UserRRef& user);

  void addChild(const ForkId& child, const User& parent, WorkerId to);
  /// The child has been accepted, or will never arrive.
  void removeChild(const ForkId& child);

  /// The numbers of this node's own streams; adopt() is at the other end of the deliveries, OwnerTable of the
  /// registrations.
  uint64_t numberDelivery(WorkerId to);
  uint64_t numberRegistration(WorkerId owner);

  /// Forgets the children that a lost worker was to accept, or whose value it owned.
  void loseWorker(WorkerId worker);
  /// Another worker has joined under the id of a lost one.
  void welcome(WorkerId worker);
  bool lost(WorkerId worker) const;

  std::vector<User> live() const;
  /// Waits until no user is pending and no child in flight; false if `deadline` passes first.
  bool waitIdle(TimePoint deadline);
  /// Lets go of all that it keeps alive.
  void clear();

  /// Adds the workers that own what is held here, and those that children are on their way to.
  void addOwners(std::set<WorkerId>& workers) const;

  struct Counts {
    size_t pending_users = 0;
    size_t pending_children = 0;
    size_t runs = 0;  ///< of delivery numbers
  };
  Counts counts() const;

 private:
  struct Child {
    User parent;
    WorkerId to;
  };
  struct Peer {
    SeenNumbers deliveries;
    bool lost = false;
  };

  // Both under mutex_:
  User insert(const RRefId& rref, const ForkId& fork, const WorkerInfo& owner, UserRRef::Numbers numbers);
  void notifyIfIdle();

  // constant:
  const std::weak_ptr<RRefService> service_;

  mutable Mutex mutex_;
  CondVar idle_;
  // guarded by mutex_:
  std::map<ForkId, std::weak_ptr<UserRRef>> users_;
  std::map<ForkId, User> pending_;
  std::map<ForkId, Child> children_;
  std::map<WorkerId, Peer> peers_;
  NumberSource registrations_;
  NumberSource deliveries_;
};

}  // namespace torchrpc
