#pragma once

// A node: combines the layers below to a worker of a group. Several nodes can live in one process.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "autograd/autograd_service.h"
#include "base/defaults.h"
#include "device/device_messenger.h"
#include "device/group_device_maps.h"
#include "device/group_devices.h"
#include "node/allow_list.h"
#include "node/call_service.h"
#include "node/callable.h"
#include "node/group.h"
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

class CppFunctions;

class Node : public std::enable_shared_from_this<Node> {
 public:
  /// The options with which a worker starts. bindings/ and api/ fill them; each layer receives its own part unchanged,
  /// apart from what the node sets.
  struct Options {
    /// The node sets `incarnation`, `liveness`, `max_queued_bytes`, `idempotency_window`, and `copies_shared_tensors`
    /// if callers are restricted.
    Agent::Options agent;
    AutogradService::Options autograd;  ///< the node sets `progress_timeout` and `first_context`
    RRefService::Options rrefs;  ///< the node sets `first_number` and `group`, and `encode_value` unless it is set
    /// Used by create(), which sets `node_name`, `rendezvous_host` and, unless it is set, `secret`.
    TransportOptions transport;
    /// The URL at which the group meets. The caller opens the store; the node uses the URL only to choose the interface
    /// to listen on.
    std::string rendezvous = kDefaultRendezvous;
    int32_t world_size = 0;  ///< 0: the group grows as workers join
    /// Whether the store is that of a static group that has formed, in which the node takes the place of this worker.
    bool takes_place = false;
    /// Whether only the node uses the store. Then the node shortens the store's time-out when it ends.
    bool owns_store = false;
    /// The address at which rank 0 serves the store in its process. Empty if another process serves it, or it is a
    /// file.
    std::optional<StoreAddress> served_store{};
    std::string stored_secret{};                  ///< set by create(): the store's value of the group's secret
    Duration timeout = kDefaultTimeout;           ///< of calls without their own
    Duration init_timeout = kDefaultInitTimeout;  ///< for the group to form
    /// A worker that stays silent this long is lost. Empty: defaultLivenessTimeout().
    std::optional<Duration> liveness_timeout;
    /// As Agent::Options::max_queued_bytes. Empty: defaultMaxQueuedBytes().
    std::optional<size_t> max_queued_bytes;
    /// As Agent::Options::idempotency_window. Empty: defaultIdempotencyWindow().
    std::optional<Duration> idempotency_window;
    std::string metadata;     ///< published to all workers of the group; opaque to the core. See Node::metadata().
    WorkerDevices devices{};  ///< published to all workers of the group; the device maps follow from those of all
    /// The functions that callers may run here; see AllowLists. This worker itself may run all functions, unless there
    /// is a single list for all workers. With a list, tensors that arrive in shared memory are copied, so that the
    /// caller cannot change them after a function has checked them.
    std::vector<Allowance> allowed_functions;
    /// The C++ functions that this node serves besides those of its process; null: none.
    std::shared_ptr<const CppFunctions> functions{};
    /// Whether calls are counted from the start. Empty: defaultMetrics().
    std::optional<bool> metrics;
    /// Calls that take longer than this are reported; kNoLimit: none. Empty: defaultSlowCall().
    std::optional<Duration> slow_call;
    SlowCalls::Reporter report_slow_calls;  ///< empty: slow calls are logged
    Interceptors::List interceptors{};      ///< of calls, the outermost first
    /// The address of the HealthServer; empty: there is none.
    std::string health_address{};
    /// The program's own health check; may be empty.
    HealthServer::Check health_check{};
    /// Finds the stacks of the program's threads for the inspector; null: the program has no interpreter.
    std::shared_ptr<Inspector::StackSource> stacks{};
    /// Whether workers on this machine use the memory of this worker's device tensors instead of copies. Then this
    /// worker must live as long as its tensors are used, and neither side may change them while the other uses them.
    bool shares_device_tensors = false;
    /// False: Python values that are no plain data travel as ValueFormat::kObjects, never as pickles. True: as pickles,
    /// except to and from workers that allowed_functions limits.
    bool uses_pickles = true;
  };

  /// Makes a node with the transport that makeGroupTransport() makes from `options` and `store`. Blocks on the store.
  /// Throws as the constructor and makeGroupTransport() do. Neither a forked child nor a thread of the node's own pool
  /// destroys the node: then it lives until the process ends.
  static std::shared_ptr<Node> create(const Options& options, StorePtr store);
  /// Makes a node over any transport. Throws Error(kInvalidArgument) for an invalid name, rank or world size.
  Node(const Options& options, StorePtr store, std::unique_ptr<Transport> transport);
  /// Calls shutdown().
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  // --- the start, on one thread ---
  /// Registers another runner beside those of operators and C++ functions; before start().
  void serve(CallableType type, const std::shared_ptr<CallableRunner>& runner);
  /// Before start(), with Options::takes_place: takes the place of an earlier start of this worker, which has been
  /// lost. Returns false if there is no such place; then the node cannot be used. Throws Error(kRendezvous) if the
  /// earlier start is alive.
  bool takePlace();
  /// Before start(): keeps the calls of other workers until releaseFirstCalls(). See Note [First calls].
  void keepFirstCalls() { first_calls_ = agent_.keepCalls(); }
  /// The program's own code is about to run after the start: after a few milliseconds the calls run that were kept.
  void releaseFirstCalls();
  /// Joins the group. On return every worker of a static group serves calls; in a group that grows, every worker that
  /// has joined. Throws Error: kRendezvous; kInvalidArgument if the devices of the workers do not fit together.
  void start();

  // --- in between, any thread ---
  /// Throws Error(kShutdown) in a forked child: see Note [Forked children].
  void requireItsProcess() const;
  const WorkerInfo& self() const { return agent_.self(); }
  Agent& agent() { return agent_; }
  Group& group() { return group_; }
  /// Whether this worker has device maps that name its devices.
  bool usesDevices() const { return devices_.isUsed(); }
  /// The messenger for calls, which records them in autograd contexts.
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
  /// See Options::functions.
  const std::shared_ptr<const CppFunctions>& functions() const { return options_.functions; }
  bool usesPickles() const { return options_.uses_pickles; }
  Duration timeout() const { return Duration(timeout_.load()); }
  void setTimeout(Duration timeout) { timeout_ = timeout.count(); }
  /// Throws Error(kUnknownWorker), which lists the workers of the group.
  WorkerInfo worker(std::string_view name) const { return agent_.directory().require(name); }
  WorkerInfo worker(WorkerId id) const { return agent_.directory().require(id).info; }
  std::vector<WorkerInfo> workers() const { return agent_.directory().all(); }
  /// The workers that have neither been lost nor left, as far as this worker knows.
  std::vector<WorkerInfo> livingWorkers() const { return agent_.membership().living(workers()); }
  /// Calls `handler` for each change of a member from now on, on a thread of the pool. This node then connects to all
  /// members, to notice when they end. The handler must not throw.
  void onMemberChange(Membership::Handler handler);
  /// The Options::metadata of a worker of the group. Throws Error(kUnknownWorker).
  std::string metadata(WorkerId id) const { return agent_.directory().require(id).metadata; }
  /// Whether a worker of the group is a member, and no client, by its own record. Throws Error(kUnknownWorker).
  bool isMember(WorkerId id) const { return agent_.directory().require(id).is_member; }
  // --- calls, any thread ---
  /// The message of a call, and the forks in it.
  struct Outgoing {
    Message message;
    std::vector<RRefFork> forks;
  };
  /// Sends a call, recorded in the thread's autograd context. If the call certainly never arrives, its forks are
  /// abandoned.
  void call(WorkerId to, Outgoing&& call, Duration timeout, Messenger::ReplyHandler&& done);
  /// Makes a reply to `to` that holds a value in plain form. Throws Error(kSerialization).
  Message replyWith(const c10::IValue& value, WorkerId to);
  /// Adopts the RRefs that arrived with a reply, without waiting for their owners. Throws Error.
  std::vector<RRefPtr> adoptRRefs(const Message& reply);

  // --- the end, on one thread ---
  /// Makes waitForStopRequest() return. Any thread. For functions that end a worker: a function cannot shut down the
  /// node that runs it.
  void requestStop();
  /// Calls requestStop() when the stop of `token` is requested. To be called once.
  void stopBy(const std::stop_token& token);
  /// Blocks until requestStop() is called; returns false after `timeout`. A signal interrupts the wait.
  bool waitForStopRequest(Duration timeout);
  /// For a static group: this worker ends before the others, which continue without it and do not count it as lost at
  /// their end. Refuses new calls, and waits until the calls under way, made and served, have ended. Returns false if
  /// some have not ended after `timeout`. Call shutdown() next.
  bool leaveAlone(Duration timeout);
  /// The first step of shutdown(): refuses new calls, and waits until those that this node serves are answered, for
  /// kServedCallsGrace at most. Returns false if `timeout` passes before that: then call it again. drain() and
  /// shutdown() wait for peers no longer than `limit`, which a later call can shorten.
  bool drain(Duration limit, Duration timeout);
  /// drain(), and the second step: fails all calls under way, and says goodbye to the peers (see Note [The end of a
  /// node]). Returns false as drain() does.
  bool leave(Duration timeout);
  /// Calls leave(), and closes the node. Nothing of this node runs when it returns. Throws Error(kInvalidArgument) on a
  /// thread of the node's own pool, which would wait for itself. Idempotent.
  void shutdown() { shutdown(kNoLimit); }
  /// The same, but returns false if functions still run here after `timeout`: such a node must never be destroyed.
  bool shutdown(Duration timeout);
  /// For use after shutdown() has returned false: ends everything without waiting. Functions that still run continue
  /// without RPC.
  void abandon();
  /// Blocks until the call table has room for a new call to `to`, for at most the call's own `timeout`. Does not block
  /// on pool threads. Throws Error(kTimeout).
  void waitForCapacity(const WorkerInfo& to, Duration timeout);

  std::map<std::string, std::string> metrics() const;
  /// The address of the HealthServer; empty: there is none.
  std::string healthAddress() const { return health_ ? health_->address() : ""; }

 private:
  /// Returns the reason for health checks to fail; empty if the worker serves calls. Any thread.
  std::string whyNotServing() const;

  /// Returns null if slow calls are not reported.
  std::unique_ptr<SlowCalls> makeSlowCalls();
  // Each layer's part of the options, completed. The members in front of the layer must be initialised.
  Agent::Options agentOptions() const;
  AutogradService::Options autogradOptions() const;
  RRefService::Options rrefOptions();
  Group::Options groupOptions() const;
  /// Makes the card by which tools on this machine find the worker.
  WorkerCard makeCard(const std::string& address) const;
  /// Starts to listen for other workers; once.
  void listen();
  /// Throws Error(kInvalidArgument) on a thread of the node's own pool.
  void requireOtherThread() const;

  const Options options_;
  const AllowLists allowed_;
  const StorePtr store_;
  const uint64_t incarnation_;
  std::atomic<Duration::rep> timeout_;
  const std::shared_ptr<Timer> timer_;
  CallMetrics call_metrics_;
  mutable Agent agent_;
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
  GroupDeviceMaps maps_;
  Group group_;
  Mutex stop_mutex_;
  CondVar stop_requested_;
  bool is_stop_requested_ TORCHRPC_GUARDED_BY(stop_mutex_) = false;
  std::atomic<bool> has_started_{false};
  std::shared_ptr<CallGate::Hold> first_calls_;  ///< set before start(), by keepFirstCalls(); may be null
  // Used by the thread that starts and ends the node only:
  std::unique_ptr<HealthServer> health_;  ///< from the construction to shutdown()
  WorkerCard card_;
  bool is_listening_ = false;
  std::optional<std::stop_callback<std::function<void()>>> stop_callback_;
};

}  // namespace torchrpc
