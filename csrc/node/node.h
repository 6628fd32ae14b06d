#pragma once

// A worker: transport, agent, RRefs and the runners of callables put together. Several can live in one process.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "agent/rendezvous.h"
#include "autograd/autograd_service.h"
#include "node/allow_list.h"
#include "node/call_service.h"
#include "node/callable.h"
#include "node/rref_value.h"
#include "optim/distributed_optimizer.h"
#include "profiling/profiler.h"
#include "rref/rref_service.h"

namespace torchrpc {

class Node : public std::enable_shared_from_this<Node> {
 public:
  struct Options {
    WorkerInfo self;
    int32_t world_size = 0;                            ///< 0: the group grows as workers join
    size_t threads = 16;                               ///< of the pool that user code runs on
    Duration timeout = std::chrono::seconds(60);       ///< of calls that name none; 0: never
    Duration init_timeout = std::chrono::minutes(30);  ///< for the group to gather
    bool propagate_deadlines = false;                  ///< calls made while serving a call end with it
    std::optional<Duration> liveness_timeout;          ///< after which silence a worker is lost; empty: the default
    std::string metadata;  ///< what all workers are to know of this one, besides; see metadata()
    Limits limits;
    SendFaultPolicy faults;  ///< for tests of programs; empty: none
    /// Makes the reply to a fetch of an RRef's value, where it is not a plain one; may be empty.
    std::function<Message(const c10::IValue& value, const WorkerInfo& to)> encode_value;
    /// What a node or hook of a backward pass threw, as an error; may be empty.
    std::function<Error(std::exception_ptr raised)> to_error;
    /// What the user's autograd nodes and hooks need on the thread that runs them, as long as it lives; empty: nothing.
    std::function<std::shared_ptr<void>()> enter_user_code;
    /// What runners in the lane need; see CallableRunner::where().
    Strand::Enter enter_strand;
    AllowListPtr allowed;  ///< what callers may run
  };

  /// Throws Error(kInvalidArgument) for a name, rank or world size that cannot be.
  Node(Options options, StorePtr store, std::unique_ptr<Transport> transport);
  /// shutdown().
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  // --- the start, on one thread ---
  /// Registers a runner besides those of operators and native functions; before start().
  void serve(CallableType type, std::shared_ptr<CallableRunner> runner);
  /// Joins the group. On return every worker of a static group serves calls; a group that grows: those that have
  /// joined. Throws Error(kRendezvous).
  void start();

  // --- in between, any thread ---
  const WorkerInfo& self() const { return agent_.self(); }
  Agent& agent() { return agent_; }
  /// What calls are to be sent through, so that autograd contexts record them.
  Messenger& messenger() { return autograd_.recorder(); }
  AutogradService& autograd() { return autograd_; }
  Profiler& profiler() { return profiler_; }
  RRefService& rrefs() { return *rrefs_; }
  OptimService& optim() { return optim_; }
  const StorePtr& store() const { return store_; }
  const AllowListPtr& allowed() const { return options_.allowed; }
  bool isStaticGroup() const { return options_.world_size > 0; }
  Duration timeout() const { return Duration(timeout_.load()); }
  void setTimeout(Duration timeout) { timeout_ = timeout.count(); }
  /// Throws Error(kUnknownWorker) with the names there are.
  WorkerInfo worker(const std::string& name) const;
  WorkerInfo worker(WorkerId id) const;
  std::vector<WorkerInfo> workers() const { return agent_.directory().all(); }
  /// What a worker of the group gave as Options::metadata. Throws Error(kUnknownWorker).
  std::string metadata(WorkerId id) const;
  /// Group that grows: a worker has joined or left.
  void admit(const WorkerInfo& worker);
  void expel(const WorkerInfo& worker);

  // --- calls, any thread ---
  /// A call's message and the forks in it.
  struct Outgoing {
    Message message;
    std::vector<RRefFork> forks;
  };
  /// Sends a call, recorded in the thread's autograd context; lets go of its RRefs if it certainly never arrives.
  void call(WorkerId to, Outgoing call, Duration timeout, Messenger::ReplyHandler done);
  /// A value on its way to `to`, in plain form. Throws Error(kSerialization).
  Message replyWith(const c10::IValue& value, WorkerId to);
  /// Takes in the RRefs that came with a reply; without waiting for their owners. Throws Error.
  std::vector<RRefPtr> takeIn(const Message& reply);

  // --- the end, on one thread ---
  /// Returns when all workers of a static group have called it. Throws Error(kRendezvous) naming who did not come
  /// within `timeout` (0: waits as long as it takes), and Error(kWorkerLost), when all others have come, naming who is
  /// lost.
  void meet(const std::string& what, Duration timeout);
  /// Waits until no call is under way in the whole (static) group or, if the group grows, here. Throws as meet().
  void join(Duration timeout);
  /// Ends all that is under way; nothing of this node runs when it returns. Not from a thread of the pool. Idempotent.
  void shutdown() { shutdown(Duration::max()); }
  /// The same, but false after so long with functions still running here: such a node must never be destroyed.
  bool shutdown(Duration patience);
  /// Waits for room for another call, at most as long as that call may take; for calls that serve none. Throws
  /// Error(kTimeout).
  void awaitRoom(const WorkerInfo& to, Duration timeout);

  std::map<std::string, std::string> metrics() const { return agent_.metrics(); }

 private:
  WorkerRecord record(WorkerId id) const;
  Rendezvous::LostAmong lostAmong();
  /// Throws Error(kWorkerLost) if somebody was lost on the way to the end.
  void requireAll() const;

  const Options options_;
  const StorePtr store_;
  const uint64_t incarnation_;
  std::atomic<Duration::rep> timeout_;
  mutable Agent agent_;
  Profiler profiler_;
  AutogradService autograd_;
  const std::shared_ptr<RRefService> rrefs_;
  CallService calls_;
  OptimService optim_;
  // the starting and ending thread only:
  std::unique_ptr<Rendezvous> rendezvous_;
  std::set<WorkerId> absent_;  ///< lost while the others met
};

}  // namespace torchrpc
