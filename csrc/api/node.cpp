// Nodes of the public API: start and end of a core::Node, and its look-ups.

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>

#include "api/access.h"
#include "api/rendezvous.h"
#include "base/log.h"
#include "base/sync/interrupt.h"
#include "group/group_secret.h"
#include "wire/metadata.h"

namespace torchrpc {

namespace api {

namespace {

constexpr auto kReferencesTimeout = std::chrono::seconds(100);  // as in Python's shutdown()

/// Answers calls of Python and script functions with an error: this program has no Python.
class NoPython final : public CallableRunner {
 public:
  explicit NoPython(std::string self) : self_(std::move(self)) {}
  void call(Invocation&&, const Responder& responder) override { responder.fail(error()); }
  void evaluate(Invocation&&, ValueHandler done) override { done(error()); }

 private:
  Error error() const {
    return {
        ErrorCode::kNoSuchFunction,
        self_ +
            " is a C++ program without Python: it runs torch operators, and functions that it has registered, "
            "which Python calls as torchrpc.cpp_function(name)",
        self_};
  }
  const std::string self_;
};

/// A device without an index would mean the current device of each thread. In a map it means the first device.
c10::Device withIndex(const c10::Device& device) {
  if (device.is_cpu()) return c10::Device(c10::kCPU);
  return {device.type(), std::max<c10::DeviceIndex>(device.index(), 0)};
}

WorkerDevices workerDevices(const DeviceOptions& options) {
  auto devices = ownAccelerator();
  for (const auto& [callee, map] : options.maps) {
    auto& pairs = devices.maps[callee];
    for (const auto& [here, there] : map) pairs.emplace_back(withIndex(here), withIndex(there));
  }
  for (const auto& device : options.used) devices.devices.push_back(withIndex(device));
  devices.maps_to_same_device = options.identity;
  return devices;
}

/// Converts the options to the core's. Throws Error(kInvalidArgument) for options that are missing or invalid.
core::Node::Options coreOptions(const NodeOptions& options) {
  const auto init_timeout = limitOf(options.init_timeout, "NodeOptions::init_timeout");
  Meeting meeting{options.rendezvous, options.rank, options.world_size, init_timeout};
  resolve(meeting);
  if (options.threads == 0) throwInvalidArgument("threads must be positive, but is 0");
  if (options.max_queued_bytes == 0) throwInvalidArgument("max_queued_bytes must be positive, but is 0");
  core::Node::Options core;
  core.agent.self = {options.name.empty() ? "worker" + std::to_string(meeting.rank) : options.name, meeting.rank};
  core.agent.threads = options.threads;
  core.transport.kind = options.transport;
  core.transport.secret = options.secret;
  core.transport.identity_file = options.identity;
  core.transport.tls = {
      .certificate = options.tls.certificate,
      .authorities = options.tls.ca,
      .key = options.tls.key,
      .names = options.tls.names};
  core.transport.encryption = options.encryption;
  core.transport.port = options.port;
  core.agent.limits = core.transport.limits = {
      .head_bytes = options.limits.head_bytes,
      .segment_bytes = options.limits.tensor_bytes,
      .frame_bytes = options.limits.message_bytes,
      .tensors = options.limits.tensors};
  for (const auto& quota : options.quotas) {
    core.agent.quotas.push_back({quota.callers, {quota.calls, quota.bytes, quota.rrefs, quota.connections}});
  }
  core.rendezvous = options.rendezvous;
  core.world_size = meeting.world_size;
  core.timeout = limitOf(options.timeout, "NodeOptions::timeout");
  core.init_timeout = init_timeout;
  core.max_queued_bytes = options.max_queued_bytes;
  if (options.idempotency_window && *options.idempotency_window <= Duration::zero()) {
    throwInvalidArgument("idempotency_window must be positive");
  }
  core.idempotency_window = options.idempotency_window;
  if (options.liveness_timeout && *options.liveness_timeout < Duration::zero()) {
    throwInvalidArgument("liveness_timeout must not be negative");
  }
  if (options.liveness_timeout) {
    core.liveness_timeout = *options.liveness_timeout == Duration::zero() ? kNoLimit : *options.liveness_timeout;
  }
  core.agent.propagate_deadlines = options.propagate_deadlines;
  core.agent.cancel_on_timeout = options.cancel_on_timeout;
  core.metrics = options.metrics;
  if (options.slow_call && *options.slow_call < Duration::zero()) {
    throwInvalidArgument("slow_call must not be negative");
  }
  if (options.slow_call) core.slow_call = *options.slow_call == Duration::zero() ? kNoLimit : *options.slow_call;
  core.metadata = kCppMetadata;
  core.devices = workerDevices(options.devices);
  core.shares_device_tensors = options.devices.share;
  core.agent.max_calls = options.max_calls;
  core.interceptors = options.interceptors;
  core.health_address = options.health.address;
  core.health_check = options.health.check;
  if (options.functions) core.functions = std::static_pointer_cast<CppFunctions>(options.functions->core());
  for (const auto& [workers, functions] : options.allowed_functions_of) {
    core.allowed_functions.push_back({workers, functions});
  }
  if (options.allowed_functions) core.allowed_functions.push_back({kAllNames, options.allowed_functions});
  validateSelf(core.agent.self, core.world_size);
  if (!options.audit_log.empty()) {
    core.agent.audit_log = std::make_shared<AuditQueue>(core.agent.self.name, openAuditFile(options.audit_log));
  }
  return core;
}

/// Joins the group at the store `root` or, if that is null, at the options' rendezvous. Sets Options::served_store.
std::shared_ptr<core::Node> join(
    const NodeOptions& public_options, core::Node::Options& options, const StorePtr& root) {
  Meeting meeting{
      .url = options.rendezvous,
      .rank = options.agent.self.id,
      .world_size = options.world_size,
      .timeout = options.init_timeout,
      .has_secret = hasGivenSecret(options.transport.secret, options.transport.identity_file)};
  const auto store = root ? root : openStore(meeting);
  options.owns_store = !root;
  options.served_store = meeting.served_store;
  const auto no_python = std::make_shared<NoPython>(options.agent.self.name);
  for (int32_t first = 0;;) {
    const auto group = enterGroup(store, options.agent.self.id, first);
    options.takes_place = group.takes_place;
    auto node = core::Node::create(options, group.store);
    node->keepFirstCalls();
    node->serve(CallableType::kPython, no_python);
    node->serve(CallableType::kScript, no_python);
    if (public_options.on_member_change) node->onMemberChange(public_options.on_member_change);
    if (group.takes_place && !node->takePlace()) {
      first = group.number + 1;
      continue;
    }
    try {
      node->start();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kRendezvous || !hasEnded(*group.store)) throw;
      first = group.number + 1;
      continue;
    }
    markFormed(*group.store);
    node->releaseFirstCalls();
    return node;
  }
}

std::shared_ptr<core::Node> start(const NodeOptions& options, const StorePtr& root) {
  // Throws once, because the end of the node that has begun may wait, too.
  const InterruptScope scope([&, has_thrown = false]() mutable {
    if (has_thrown || !options.stop.stop_requested()) return;
    has_thrown = true;
    throw Error(ErrorCode::kCancelled, "a stop was requested while the node waited for its group");
  });
  checkInterrupt();
  auto core_options = coreOptions(options);
  try {
    auto node = join(options, core_options, root);
    node->stopBy(options.stop);
    return node;
  } catch (const c10::DistError& error) {  // what() has a stack trace
    throw storeLostError(core_options.agent.self.name, core_options.served_store, error);
  }
}

}  // namespace

std::shared_ptr<core::Node> coreOf(const NodeRef& node) {
  if (auto core = std::static_pointer_cast<core::Node>(node.core().lock())) {
    core->requireItsProcess();
    return core;
  }
  const std::weak_ptr<void> none;
  const bool is_default = !node.core().owner_before(none) && !none.owner_before(node.core());
  if (is_default) throwInvalidArgument("this NodeRef refers to no node: assign a node to it, or another NodeRef");
  throw Error(ErrorCode::kShutdown, "the node has shut down");
}

NodeRef refTo(const std::shared_ptr<core::Node>& node) { return NodeRef(std::weak_ptr<void>(node)); }

Duration waitLimitOf(Timeout timeout, const char* argument) {
  const auto duration = timeout.duration();
  if (duration >= Duration::zero()) return duration;
  const bool is_number = duration != Duration::min();
  throwInvalidArgument(
      std::string(argument) + " must not be negative, but is " +
      (is_number ? std::to_string(std::chrono::duration<double>(duration).count()) + " s" : "below any limit, or NaN"));
}

Duration limitOf(Timeout timeout, const char* argument) {
  const auto duration = waitLimitOf(timeout, argument);
  if (duration > Duration::zero()) return duration;
  throwInvalidArgument(std::string(argument) + " is 0: give a time, or torchrpc::kNoLimit for no limit");
}

std::shared_ptr<const Repetition> repetitionOf(const NodeRef& node) {
  if (!node.retries() && !node.key()) return nullptr;
  auto repetition = std::make_shared<Repetition>();
  if (node.retries()) repetition->policy = *node.retries();
  if (node.key()) repetition->key = *node.key();
  requireUsable(*repetition);
  return repetition;
}

Duration timeoutOf(const NodeRef& node, const core::Node& core) { return node.timeout().value_or(core.timeout()); }

bool& hasDestroyedNode() {
  thread_local bool value = false;
  return value;
}

void requireOtherThread(core::Node& core) {
  if (!core.agent().isOnOwnThread()) return;
  throwInvalidArgument(
      "a function or continuation that " + core.self().name + " runs cannot end it, because the end waits for that " +
      "code: call requestStop(), and end the node where waitForStopRequest() returns");
}

WorkerInfo resolve(const core::Node& node, const Destination& to) {
  const auto& worker = to.worker();
  if (worker.name.empty() && worker.id != kNoWorker) return node.worker(worker.id);
  auto found = node.worker(worker.name);
  if (worker.id == kNoWorker || worker.id == found.id) return found;
  throw Error(
      ErrorCode::kUnknownWorker,
      "the group has no " + toString(worker) + ": its worker " + worker.name + " is " + toString(found), worker.name);
}

}  // namespace api

inline namespace v1 {

WorkerInfo NodeRef::self() const { return api::coreOf(*this)->self(); }

WorkerInfo NodeRef::worker(const Destination& worker) const {
  const auto core = api::coreOf(*this);
  return api::concerning(core->self().name, [&] { return api::resolve(*core, worker); });
}

std::vector<WorkerInfo> NodeRef::workers() const { return api::coreOf(*this)->workers(); }

std::vector<WorkerInfo> NodeRef::livingWorkers() const { return api::coreOf(*this)->livingWorkers(); }

void NodeRef::onMemberChange(MemberHandler handler) const {
  detail::requireCallable(handler);
  api::coreOf(*this)->onMemberChange(std::move(handler));
}

void NodeRef::onWorkerLost(LossHandler handler) const {
  detail::requireCallable(handler);
  onMemberChange([handler = std::move(handler)](const WorkerInfo& worker, MemberChange change) {
    if (change == MemberChange::kLost) handler(worker);
  });
}

std::map<std::string, std::string> NodeRef::metrics() const { return api::coreOf(*this)->metrics(); }

NodeMetrics NodeRef::nodeMetrics() const {
  const auto core = api::coreOf(*this);
  const auto counts = core->agent().counts();
  return {
      .pending_calls = counts.pending_calls,
      .connections = counts.connections,
      .threads = counts.pool.threads,
      .idle_threads = counts.pool.idle,
      .blocked_threads = counts.pool.blocked,
      .queued_tasks = counts.queued_tasks,
      .held_calls = counts.queued.held_calls,
      .queued_reply_bytes = counts.queued.reply_bytes,
      .rrefs_owned = core->rrefs().debugInfo().owner_rrefs,
      .retries = counts.retries,
      .refused_by_quota = counts.refused_by_quota,
      .late_replies = counts.late_replies,
      .malformed_frames = counts.malformed_frames};
}

std::vector<CallMetrics> NodeRef::callMetrics() const {
  std::vector<CallMetrics> rows;
  for (auto& counts : api::coreOf(*this)->callMetrics().snapshot()) {
    const auto part = [&counts](double share) { return std::chrono::nanoseconds(counts.latency.quantile(share)); };
    rows.push_back(
        {.function = std::move(counts.function),
         .peer = std::move(counts.peer),
         .side = counts.side == CallCounts::Side::kOut ? CallMetrics::Side::kMade : CallMetrics::Side::kServed,
         .calls = counts.calls,
         .in_flight = counts.in_flight,
         .errors = std::move(counts.errors),
         .request_bytes = counts.request_bytes,
         .reply_bytes = counts.reply_bytes,
         .total = std::chrono::nanoseconds(counts.total_ns),
         .longest = std::chrono::nanoseconds(counts.max_ns),
         .p50 = part(0.5),
         .p90 = part(0.9),
         .p99 = part(0.99)});
  }
  return rows;
}

std::string NodeRef::healthAddress() const { return api::coreOf(*this)->healthAddress(); }

void NodeRef::requestStop() const { api::coreOf(*this)->requestStop(); }

bool Node::waitForStopRequest(Timeout timeout) {
  const auto core = api::coreOf(*this);
  return api::concerning(core->self().name, [&] {
    return core->waitForStopRequest(api::waitLimitOf(timeout, "the time-out of waitForStopRequest()"));
  });
}

NodeRef NodeRef::withRetries(const RetryPolicy& policy) const {
  requireUsable(Repetition{.policy = policy, .key = {}});
  auto other = *this;
  other.retries_ = std::make_shared<const RetryPolicy>(policy);
  return other;
}

NodeRef NodeRef::withKey(std::string key) const {
  if (key.empty()) throwInvalidArgument("the idempotency key is empty");
  requireUsable(Repetition{.policy = {}, .key = key});
  auto other = *this;
  other.key_ = std::make_shared<const std::string>(std::move(key));
  return other;
}

NodeRef NodeRef::withMetadata(Metadata metadata) const {
  Message message;
  setMetadata(message, metadata);  // throws
  auto other = *this;
  other.metadata_ = metadata.empty() ? nullptr : std::make_shared<const Metadata>(std::move(metadata));
  return other;
}

NodeRef NodeRef::withTimeout(Timeout timeout) const {
  auto other = *this;
  other.timeout_ = api::limitOf(timeout, "the time-out of withTimeout()");
  return other;
}

Node::Node(const NodeOptions& options) : Node(options, nullptr) {}

Node::Node(const NodeOptions& options, const c10::intrusive_ptr<c10d::Store>& store)
    : Node(api::concerning(options.name, [&] { return api::start(options, store); })) {}

Node::~Node() {
  const auto core = std::static_pointer_cast<core::Node>(owned_);
  if (!core) return;
  if (!core->agent().isOnOwnThread()) {
    stop();
    return;
  }
  // The end would wait for this thread, and a destructor cannot throw.
  api::hasDestroyedNode() = true;
  log(LogLevel::kError,
      "a function or continuation that " + core->self().name + " runs has destroyed it. It cannot end in order: call " +
          "requestStop() there, and destroy the node where waitForStopRequest() returns");
  core->abandon();
}

namespace {

constexpr Duration kCloseGrace = std::chrono::milliseconds(500);  // for what takes no time on an idle machine

/// Ends the node, and releases it when no code that it runs is left. Waits until the deadline, and a moment for idle
/// threads to end. Returns false if code still runs then.
bool end(std::shared_ptr<void>& owned, TimePoint deadline) {
  const auto core = std::static_pointer_cast<core::Node>(owned);
  if (core && core->agent().isInItsProcess()) {
    core->drain(timeUntil(deadline), kNoLimit);  // the functions that still run may use RRefs
    core->rrefs().destroy();
    if (!core->shutdown(timeUntil(deadlineAfter(kCloseGrace, deadline)))) return false;
  }
  owned = nullptr;
  return true;
}

Error stillRunning(core::Node& core) {
  std::string functions;
  for (const auto& thread : core.agent().threadRecords()) {
    for (const auto& call : thread.served) {
      functions += (functions.empty() ? "" : ", ") + call.function() + " for " + core.agent().worker(call.from).name;
    }
  }
  return {
      ErrorCode::kTimeout,
      core.self().name +
          " has stopped, but code that it runs had not returned when the time-out of shutdown() expired (" +
          (functions.empty() ? "a continuation" : functions) +
          "). What it uses must live until it returns: stop() and the destructor of the node wait for that"};
}

}  // namespace

void Node::shutdown(Timeout timeout) {
  const auto core = std::static_pointer_cast<core::Node>(owned_);
  if (!core) return;
  api::concerning(core->self().name, [&] {
    core->requireItsProcess();
    api::requireOtherThread(*core);
    const auto limit = api::limitOf(timeout, "the time-out of shutdown()");
    const auto deadline = deadlineAfter(limit);
    core->agent().refuseOwnCalls();
    try {
      if (!core->agent().isEnding()) {
        core->group().barrier(api::kLeaving, limit);
        if (!core->rrefs().deleteAllUsers(std::min<Duration>(api::kReferencesTimeout, timeUntil(deadline)))) {
          throw Error(ErrorCode::kTimeout, "RRefs were still in flight when the time-out for deleting them expired");
        }
        core->group().join(timeUntil(deadline));
      }
    } catch (...) {
      end(owned_, deadline);
      throw;
    }
    if (!end(owned_, deadline)) throw stillRunning(*core);
  });
}

bool Node::leave(Timeout timeout) {
  const auto core = std::static_pointer_cast<core::Node>(owned_);
  if (!core) return true;
  return api::concerning(core->self().name, [&] {
    core->requireItsProcess();
    api::requireOtherThread(*core);
    const auto limit = api::limitOf(timeout, "the time-out of leave()");
    const auto deadline = deadlineAfter(limit);
    const bool has_ended = core->leaveAlone(limit);
    core->rrefs().deleteAllUsers(timeUntil(deadline));
    return end(owned_, deadline) && has_ended;
  });
}

void Node::stop() {
  if (const auto core = std::static_pointer_cast<core::Node>(owned_)) {
    api::concerning(core->self().name, [&] { api::requireOtherThread(*core); });
  }
  end(owned_, kNever);
}

}  // namespace v1
}  // namespace torchrpc
