#pragma once

// A node: the layers below put together to a worker of a group. Several nodes can live in one process.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "agent/announcer.h"
#include "agent/rendezvous.h"
#include "agent/store_keeper.h"
#include "autograd/autograd_service.h"
#include "base/defaults.h"
#include "device/device_messenger.h"
#include "device/group_devices.h"
#include "node/allow_list.h"
#include "node/call_service.h"
#include "node/callable.h"
#include "node/interceptors.h"
#include "node/named_objects.h"
#include "node/rref_value.h"
#include "observe/call_metrics.h"
#include "observe/health_server.h"
#include "observe/inspector.h"
#include "observe/slow_calls.h"
#include "observe/worker_card.h"
#include "optim/distributed_optimizer.h"
#include "profiling/profiler.h"
#include "rref/rref_service.h"
#include "transport/registry.h"

namespace torchrpc {

/// Throws Error(kInvalidArgument), which names the limit, unless the messages of the group itself fit.
void requireUsable(const Limits& limits);

class Node : public std::enable_shared_from_this<Node> {
 public:
  /// How a worker starts. Both entrances (bindings/, api/) fill one of these; each layer receives its own part whole.
  struct Options {
    /// The node sets `incarnation`, `liveness`, `max_queued_bytes`, `idempotency_window`, and `copies_shared_tensors`
    /// if callers are restricted.
    Agent::Options agent;
    AutogradService::Options autograd;  ///< the node sets `progress_timeout` and `first_context`
    RRefService::Options rrefs;  ///< the node sets `first_number` and `group`, and `encode_value` unless it is set
    /// Used by create(), which sets `node_name`, `rendezvous_host` and, unless it is set, `secret`.
    TransportOptions transport;
    /// Where the group meets, as a URL. The store is opened by the caller: here it only says where to listen.
    std::string rendezvous = kDefaultRendezvous;
    int32_t world_size = 0;  ///< 0: the group grows as workers join
    /// The store is that of a static group that has formed: the node takes the place of this worker there.
    bool takes_place = false;
    /// Where rank 0 serves that store in its process. Empty: another process does, or it is a file.
    std::optional<StoreAddress> served_store{};
    std::string stored_secret{};                  ///< set by create(): what the store has of the group's secret
    Duration timeout = kDefaultTimeout;           ///< of calls that name none
    Duration init_timeout = kDefaultInitTimeout;  ///< for the group to form
    /// A worker that stays silent this long is lost. Empty: defaultLivenessTimeout().
    std::optional<Duration> liveness_timeout;
    /// As Agent::Options::max_queued_bytes. Empty: defaultMaxQueuedBytes().
    std::optional<size_t> max_queued_bytes;
    /// As Agent::Options::idempotency_window. Empty: defaultIdempotencyWindow().
    std::optional<Duration> idempotency_window;
    std::string metadata;     ///< published to all workers of the group; opaque to the core. See Node::metadata().
    WorkerDevices devices{};  ///< published to all workers of the group; the device maps of each follow from all
    /// The functions that callers may run here; see AllowLists. This worker itself may run all, unless one list is for
    /// all workers. With a list, tensors that arrive in shared memory are copied, because functions rely on what they
    /// have checked.
    std::vector<Allowance> allowed_functions;
    /// Whether calls are counted from the start. Empty: defaultMetrics().
    std::optional<bool> metrics;
    /// Calls that take longer are reported; kNoLimit: none. Empty: defaultSlowCall().
    std::optional<Duration> slow_call;
    SlowCalls::Reporter report_slow_calls;  ///< empty: they are logged
    Interceptors::List interceptors{};      ///< of calls, the outermost first
    /// Where probes are answered, see HealthServer; empty: nowhere.
    std::string health_address{};
    /// The program's own part of the check; may be empty.
    HealthServer::Check health_check{};
    /// Finds the stacks of the program's threads for the inspector; null: the program has no interpreter.
    std::shared_ptr<Inspector::StackSource> stacks{};
    /// Workers of this machine use the memory of this worker's device tensors instead of copies of them: it must live
    /// as long as they do, and neither side may change them while the other uses them.
    bool shares_device_tensors = false;
    /// False: Python values that are no plain data travel as named objects, never as pickles.
    bool uses_pickles = true;
  };

  /// A node whose transport is made from `options` and `store`; see makeGroupTransport. Blocks on the store. Throws as
  /// the constructor and makeGroupTransport do. A forked child never destroys it, nor does a thread of its own pool.
  static std::shared_ptr<Node> create(const Options& options, StorePtr store);
  /// A node over any transport. Throws Error(kInvalidArgument) for an invalid name, rank or world size.
  Node(const Options& options, StorePtr store, std::unique_ptr<Transport> transport);
  /// shutdown().
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  // --- the start, on one thread ---
  /// Registers another runner beside those of operators and C++ functions; before start().
  void serve(CallableType type, const std::shared_ptr<CallableRunner>& runner);
  /// Before start(), with Options::takes_place: takes the place of this worker's earlier incarnation, which has been
  /// lost. False if there is no such place; then the node is of no use. Throws Error(kRendezvous) if that one lives.
  bool takePlace();
  /// Joins the group. On return every worker of a static group serves calls; in a group that grows, every worker that
  /// has joined. Throws Error: kRendezvous; kInvalidArgument if the devices of the workers do not fit together.
  void start();

  // --- in between, any thread ---
  /// Throws Error(kShutdown) in a forked child: see Note [Forked children].
  void requireItsProcess() const;
  const WorkerInfo& self() const { return agent_.self(); }
  Agent& agent() { return agent_; }
  /// Whether this worker has device maps that name its devices.
  bool usesDevices() const { return devices_.isUsed(); }
  /// The messenger to send calls through: autograd contexts record them.
  Messenger& messenger() { return autograd_.recorder(); }
  AutogradService& autograd() { return autograd_; }
  CallMetrics& callMetrics() { return call_metrics_; }
  Interceptors& interceptors() { return interceptors_; }
  Profiler& profiler() { return profiler_; }
  RRefService& rrefs() { return *rrefs_; }
  OptimService& optim() { return optim_; }
  NamedObjects& namedObjects() { return named_objects_; }
  const Inspector& inspector() const { return inspector_; }
  const StorePtr& store() const { return store_; }
  const AllowLists& allowed() const { return allowed_; }
  bool usesPickles() const { return options_.uses_pickles; }
  bool isStaticGroup() const { return options_.world_size > 0; }
  Duration timeout() const { return Duration(timeout_.load()); }
  void setTimeout(Duration timeout) { timeout_ = timeout.count(); }
  /// Throws Error(kUnknownWorker), which lists the workers of the group.
  WorkerInfo worker(const std::string& name) const;
  WorkerInfo worker(WorkerId id) const;
  std::vector<WorkerInfo> workers() const { return agent_.directory().all(); }
  /// Those of them that have neither been lost nor left, as far as this worker knows.
  std::vector<WorkerInfo> livingWorkers() const { return agent_.membership().living(workers()); }
  /// From now on `handler` is called, on a thread of the pool, with each change of a member. This node connects to all
  /// members then, to notice their ends. The handler must not throw.
  void onMemberChange(Membership::Handler handler);
  /// The Options::metadata of a worker of the group. Throws Error(kUnknownWorker).
  std::string metadata(WorkerId id) const;
  /// Whether a worker of the group says that it is a member, and no client. Throws Error(kUnknownWorker).
  bool isMember(WorkerId id) const;
  /// In a group that grows: another worker has joined or left. admit() throws Error, and changes nothing, if the store
  /// has no such record of the worker, or its devices do not fit to those of the others.
  void admit(const WorkerInfo& worker);
  void expel(const WorkerInfo& worker);

  // --- calls, any thread ---
  /// A call's message and the forks that travel in it.
  struct Outgoing {
    Message message;
    std::vector<RRefFork> forks;
  };
  /// Sends a call, recorded in the thread's autograd context. If the call certainly never arrives, its forks are
  /// abandoned.
  void call(WorkerId to, Outgoing call, Duration timeout, Messenger::ReplyHandler done);
  /// The reply to `to` that holds a value in plain form. Throws Error(kSerialization).
  Message replyWith(const c10::IValue& value, WorkerId to);
  /// Adopts the RRefs that arrived with a reply, without waiting for their owners. Throws Error.
  std::vector<RRefPtr> adoptRRefs(const Message& reply);

  // --- the end, on one thread ---
  /// Returns when all workers of a static group have called it. Throws Error(kRendezvous) naming the workers that did
  /// not call it within `timeout`. Throws Error(kWorkerLost) when all but lost workers have called it; it
  /// names those.
  void barrier(const std::string& name, Duration timeout);
  /// Waits until no call is under way in the whole static group or, if the group grows, on this node. Throws as
  /// barrier().
  void join(Duration timeout);
  /// From any thread: waitForStopRequest() returns. For functions that end a worker, which cannot shut it down.
  void requestStop();
  /// False after `timeout`. A signal ends the wait.
  bool waitForStopRequest(Duration timeout);
  /// Static group: this worker ends before the others, which go on without it, and do not count it as lost at their
  /// end. Refuses new calls, and waits until those under way, made and served, have ended; false if some have not after
  /// `timeout`. shutdown() comes next.
  bool leaveAlone(Duration timeout);
  /// The first step of shutdown(): refuses new calls, and waits until those that this node serves are answered, for
  /// kServedCallsGrace at most. False if `timeout` passes before: then call it again. It and shutdown() wait for peers
  /// no longer than `limit`, which a later call can shorten.
  bool drain(Duration limit, Duration timeout);
  /// drain(), and the second step: fails all calls under way, and says goodbye to the peers (see Note [The end of a
  /// node]). False as drain().
  bool leave(Duration timeout);
  /// leave(); nothing of this node runs when it returns. Throws Error(kInvalidArgument) on a thread of the node's own
  /// pool, which would wait for itself. Idempotent.
  void shutdown() { shutdown(kNoLimit); }
  /// The same, but returns false if functions still run here after `timeout`: such a node must never be destroyed.
  bool shutdown(Duration timeout);
  /// After shutdown() has returned false: ends all without waiting. Functions go on, without RPC.
  void abandon();
  /// Blocks until the call table has room for a new call to `to`, for at most the call's own `timeout`. Does not block
  /// on pool threads. Throws Error(kTimeout).
  void waitForCapacity(const WorkerInfo& to, Duration timeout);

  std::map<std::string, std::string> metrics() const;
  /// Where probes are answered; empty: nowhere.
  std::string healthAddress() const { return health_ ? health_->address() : ""; }

 private:
  /// Of probes. Any thread.
  std::string whyNotServing() const;

  /// Null: slow calls are not reported.
  std::unique_ptr<SlowCalls> makeSlowCalls();
  // Each layer's part of the options, completed. The members in front of the layer must be initialised.
  Agent::Options agentOptions() const;
  AutogradService::Options autogradOptions() const;
  RRefService::Options rrefOptions();
  WorkerRecord record(WorkerId id) const;
  /// For tools on this machine.
  WorkerCard makeCard(const std::string& address) const;
  /// The part of start() that uses the store.
  void joinOthers(TimePoint deadline);
  /// What the workers in the directory have published. Throws Error(kProtocol).
  GroupDevices groupDevices();
  /// Throws Error: kProtocol, kInvalidArgument unless the devices of all workers fit together, and those of `joining`.
  void checkDevices(const WorkerRecord* joining = nullptr);
  /// The group of fixed size cannot form with these workers: they may form another one.
  void endRefusedGroup();
  /// From now on this worker has the device maps that follow from the directory.
  void updateDeviceMaps();
  /// A worker has joined whose devices have been checked.
  void add(const WorkerRecord& record);
  /// Listens, and makes the rendezvous.
  void beginRendezvous();
  /// Sends the address of this worker, which has taken the place of a lost one, to the other members.
  void announce(const std::vector<WorkerRecord>& records, Duration timeout);
  /// Applies the record of a worker that has taken the place of a lost one. On the loop.
  Status accept(const WorkerRecord& record);
  /// Finds the group's store again, if rank 0 served it and has been started again. Throws Error(kWorkerLost) if rank 0
  /// has served it, and nobody does now.
  void renewStore();
  /// Runs a step that uses the store. What c10d throws becomes an Error(kRendezvous).
  template <typename Step>
  void overStore(const Step& step) const;
  /// Runs the same, in which all workers meet at the group's end.
  template <typename Step>
  void meet(const Step& step);
  Rendezvous::LostAmong lostAmong();
  /// Throws Error(kInvalidArgument) on a thread of the node's own pool.
  void requireOtherThread() const;
  /// Throws Error(kWorkerLost) if workers were lost while the group came to its end.
  void requireAll();

  const Options options_;
  const AllowLists allowed_;
  const StorePtr store_;
  const uint64_t incarnation_;
  std::atomic<Duration::rep> timeout_;
  const std::shared_ptr<Timer> timer_;
  CallMetrics call_metrics_;
  mutable Agent agent_;
  Announcer announcer_;
  const std::unique_ptr<SlowCalls> slow_calls_;
  Interceptors interceptors_;
  DeviceMessenger devices_;
  Profiler profiler_;
  AutogradService autograd_;
  const std::shared_ptr<RRefService> rrefs_;
  CallService calls_;
  OptimService optim_;
  NamedObjects named_objects_;
  Inspector inspector_;
  /// Orders updates of the device maps, so that none takes back a later one: see Note [Device maps of a group].
  Mutex device_maps_mutex_;
  Mutex stop_mutex_;
  CondVar stop_requested_;
  bool is_stop_requested_ TORCHRPC_GUARDED_BY(stop_mutex_) = false;
  std::atomic<bool> has_started_{false};
  std::atomic<StoreKeeper*> keeper_pointer_{nullptr};  ///< of the workers that bring the store back
  // Used by the thread that starts and ends the node only:
  std::vector<WorkerRecord> place_;       ///< of takePlace()
  std::unique_ptr<HealthServer> health_;  ///< from the construction to shutdown()
  WorkerCard card_;
  std::unique_ptr<Rendezvous> rendezvous_;
  std::unique_ptr<StoreKeeper> keeper_;  ///< made before the node has started
  bool store_is_lost_ = false;
  std::set<WorkerId> absent_;  ///< workers that were lost while the group formed
};

}  // namespace torchrpc
