#pragma once

// The user's half of the RRef protocol: the live forks of this node. The table keeps pending forks alive until the
// owner has answered, and parents while their children in flight need them. The rules are in
// wire/PROTOCOL.md, "RRefs". The table sends no messages.
// Threads: any. No UserRRef is settled or released under the lock.

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "rref/fork_protocol.h"
#include "rref/rref.h"
#include "rref/worker_counts.h"

namespace torchrpc {

class UserTable {
 public:
  using User = std::shared_ptr<UserRRef>;

  /// `first_number`: see RRefService::Options.
  UserTable(std::shared_ptr<const GroupMember> self, std::weak_ptr<RRefService> service, uint64_t first_number)
      : self_(std::move(self)), service_(std::move(service)), registrations_(first_number), deliveries_(first_number) {}

  /// Makes the user for a remote() that is about to be sent; pending until settled().
  User create(const RRefId& rref, const ForkId& fork, const WorkerInfo& owner, const PeerId& owner_peer);

  /// Makes a user for a fork that has arrived; pending until settled(). If the fork arrives again, returns the same
  /// user (`fresh` is false), or fails with kRRefDeleted if that user has been destroyed. Fails with kProtocol if
  /// another RRef has a fork with that id.
  struct Adopted {
    User user;
    bool fresh = true;
  };
  Result<Adopted> adopt(const RRefFork& fork, const WorkerInfo& owner);

  /// Makes a user that has been settled pending again.
  void reopen(const User& user);
  /// Stops keeping a user alive that is confirmed or has failed.
  void settled(const UserRRef& user);
  /// Removes a user whose last reference has been released.
  void remove(const UserRRef& user);

  void addChild(const ForkId& child, const User& parent, WorkerId to);
  /// Releases the parent of a child that will never arrive.
  void removeChild(const ForkId& child);
  /// Releases the parent of a child that worker `by` has accepted. No effect unless the child was made for `by`, or for
  /// an unknown receiver.
  void acceptChild(const ForkId& child, WorkerId by);

  /// Return the next numbers of the streams that this node sends. At the receiver, adopt() checks deliveries, and
  /// OwnerTable checks registrations.
  uint64_t numberDelivery(WorkerId to);
  uint64_t numberRegistration(WorkerId owner);

  /// Removes the children that a lost worker was to accept, and those whose value it owned.
  void loseWorker(WorkerId worker);
  /// A worker has joined: removes the delivery numbers of its earlier starts, and children as loseWorker(). Has an
  /// effect once.
  void onWorkerJoined(const PeerId& joined);
  bool lost(WorkerId worker) const;

  std::vector<User> live() const;
  /// Waits until no user is pending and no child in flight. Returns false if `deadline` passes first.
  bool waitIdle(TimePoint deadline);
  /// Releases everything that the table keeps alive.
  void clear();

  /// Adds the owners of the live forks, and the receivers of children in flight.
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
  /// A live fork. The program may release it at any time.
  struct Known {
    std::weak_ptr<UserRRef> user;
    WorkerId owner = kNoWorker;
  };
  struct Worker {
    PeerId latest{};
    SeenNumbers deliveries;
    bool lost = false;
  };

  User insert(const RRefId& rref, const ForkId& fork, const WorkerInfo& owner, UserRRef::Numbers numbers)
      TORCHRPC_REQUIRES(mutex_);
  /// Removes and returns the children that the worker was to accept, and those whose value it owned.
  std::vector<Child> takeChildrenOf(WorkerId worker) TORCHRPC_REQUIRES(mutex_);
  using Children = std::map<ForkId, Child>;
  /// Removes the child and returns its parent, which the caller must release after the lock.
  User takeChild(Children::iterator child) TORCHRPC_REQUIRES(mutex_);
  bool isIdle() const TORCHRPC_REQUIRES(mutex_) { return pending_.empty() && children_.empty(); }
  void notifyIfIdle() TORCHRPC_REQUIRES(mutex_);

  // constant:
  const std::shared_ptr<const GroupMember> self_;
  const std::weak_ptr<RRefService> service_;

  mutable Mutex mutex_;
  CondVar idle_;
  std::map<ForkId, Known> users_ TORCHRPC_GUARDED_BY(mutex_);
  WorkerCounts users_of_ TORCHRPC_GUARDED_BY(mutex_);  ///< by owner
  std::map<ForkId, User> pending_ TORCHRPC_GUARDED_BY(mutex_);
  Children children_ TORCHRPC_GUARDED_BY(mutex_);
  WorkerCounts children_for_ TORCHRPC_GUARDED_BY(mutex_);  ///< by receiver
  std::map<WorkerId, Worker> workers_ TORCHRPC_GUARDED_BY(mutex_);
  NumberSource registrations_ TORCHRPC_GUARDED_BY(mutex_);
  NumberSource deliveries_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
