#pragma once

// The group of a node: how this worker meets the others when it starts, takes the place of a lost worker, learns of
// workers that join and leave later, and meets the others again before it ends. Workers meet over the group's store; a
// worker that has taken a place announces itself over connections (announcer.h).
// Threads: admit(), expel() and isStatic() from any; everything else belongs to the thread that starts and ends the
// node.

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "agent/announcer.h"
#include "device/group_device_maps.h"
#include "group/rendezvous.h"
#include "group/store_keeper.h"

namespace torchrpc {

class Group {
 public:
  struct Options {
    WorkerRecord self;  ///< without the address, which listen() gives it
    StorePtr store;
    std::string secret;         ///< of the group; empty: what others write into the store is not authenticated
    std::string stored_secret;  ///< the store's value of the group's secret
    /// The address at which rank 0 serves the store in its process. Empty if another process serves it, or it is a
    /// file.
    std::optional<StoreAddress> served_store;
    bool owns_store = false;            ///< only the node uses the store
    bool are_names_proved = false;      ///< workers prove their names to each other
    std::function<Duration()> timeout;  ///< for the store to answer when another worker joins
  };

  /// What it uses of the node. Everything must outlive it.
  struct Environment {
    Agent& agent;
    GroupDeviceMaps& maps;
    /// The directory has the record of a worker that has joined after this one.
    std::function<void(const WorkerRecord&)> on_joined;
    /// A worker has been removed from the directory, but its connection may still be open.
    std::function<void(const WorkerInfo&)> on_left;
  };

  /// Returns the number of this start (PeerId), greater than those of earlier starts of this worker in the group.
  /// Blocks on the store. `takes_place`: the group is static and has formed.
  static uint64_t newIncarnation(
      const WorkerInfo& self, int32_t world_size, bool takes_place, const StorePtr& store, const std::string& secret);

  Group(Options options, Environment environment);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  /// Whether the group has a fixed size.
  bool isStatic() const { return options_.self.world_size > 0; }

  // --- The start ---
  /// Sets the address at which this worker listens; first of all.
  void listenAt(const std::string& address);
  /// Takes the place of an earlier start of this worker, which has been lost, in a group that has formed. Returns
  /// false if there is no such place; then the node cannot be used. Throws Error(kRendezvous) if the earlier
  /// start is alive.
  bool takePlace(Duration timeout);
  /// Joins the group; after takePlace() announces this worker. On return every worker of a static group serves calls;
  /// in a group that grows, every worker that has joined. Throws Error: kRendezvous; kInvalidArgument if the devices of
  /// the workers do not fit together.
  void start(Duration timeout);

  // --- Workers that join and leave later, for a group that grows ---
  /// Called when another worker has joined. Throws Error, and changes nothing, if the store has no such record of the
  /// worker, its devices do not fit those of the others, a living worker has its name or its id, or the record is not
  /// that of `caller`, which asks for it. Null: the program itself asks. A lost worker with its name or its id leaves
  /// the group.
  void admit(const WorkerInfo& worker, const Peer* caller = nullptr);
  /// Called when another worker has left. Throws Error if `caller` is another worker than the one that has left.
  void expel(const WorkerInfo& worker, const Peer* caller = nullptr);

  // --- The end ---
  /// Returns when all workers of a static group have called it. Throws Error(kTimeout), which names the workers that
  /// did not call it within `timeout`. Throws Error(kWorkerLost), which names the lost workers, when all others have
  /// called it.
  void barrier(const std::string& name, Duration timeout);
  /// Waits until no call is under way in the whole static group or, if the group grows, on this node. Throws as
  /// barrier().
  void join(Duration timeout);
  /// Static group: tells the other workers that this one ends before them, and is not lost.
  void markLeft(Duration timeout);
  /// This worker is about to end without meeting the others: waits for those that still read what it has in the store,
  /// for `limit` at most.
  void release(Duration limit);

 private:
  /// The part of start() that uses the store.
  void meetOthers(TimePoint deadline);
  /// Connects to the group's store again if rank 0 served it and has been restarted. Throws Error(kWorkerLost) if rank
  /// 0 served it and no process serves it now.
  void renewStore();
  /// Runs a step that uses the store. Converts exceptions of c10d to Error(kRendezvous).
  template <typename Step>
  void overStore(const Step& step) const;
  /// Runs a step in which all workers meet at the end of the group. Renews the store before, and calls requireAll()
  /// afterwards.
  template <typename Step>
  void meet(const Step& step);
  /// Marks a group of fixed size that cannot form with its workers as ended, so that they may form another one.
  void endRefused();
  /// Restores a lost store from now on, if rank 0 serves it and this is one of the first ranks.
  void keepStore();
  /// Sends the address of this worker, which has taken the place of a lost one, to the other members.
  void announce(const std::vector<WorkerRecord>& records, Duration timeout);
  /// Applies the record of a worker that has taken the place of a lost one. On the loop.
  Status accept(const WorkerRecord& record);
  /// Adds a worker that has joined, and whose devices have been checked.
  void add(const WorkerRecord& record);
  /// From now on the worker is not in the group.
  void forget(const WorkerInfo& worker);
  Rendezvous::LostAmong lostAmong();
  /// Ends the use of the store in the last step in which all workers meet: from then on worker 0, which waits for this
  /// for at most `grace`, may end the process that serves the store. c10d's client writes to standard error if it finds
  /// the store ended, so this worker does not use it any more. Workers that have left alone are not absent any more.
  void leaveStore(const std::string& phase, Duration grace);
  /// Throws Error(kWorkerLost) if workers were lost before the end of the group. Does not use the store.
  void requireAll() const;
  const WorkerInfo& self() const { return options_.self.info; }

  const Options options_;
  const Environment environment_;
  Agent& agent_;
  GroupDeviceMaps& maps_;
  Announcer announcer_;
  std::atomic<bool> is_open_{false};                   ///< rendezvous_ is set: a peer may ask for admission before
  std::atomic<StoreKeeper*> keeper_pointer_{nullptr};  ///< set on the ranks that restore a lost store
  // Used by the thread that starts and ends the node only:
  std::vector<WorkerRecord> place_;  ///< of takePlace()
  std::unique_ptr<Rendezvous> rendezvous_;
  std::unique_ptr<StoreKeeper> keeper_;  ///< made before the node has started
  bool must_release_store_ = false;      ///< others may still read the result of the start, in this process's store
  bool store_is_lost_ = false;
  std::set<WorkerId> absent_;  ///< workers that were lost while the group formed
};

}  // namespace torchrpc
