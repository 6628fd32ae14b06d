#include "node/node.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <memory>

#include "base/exception.h"
#include "base/log.h"
#include "base/sync/interrupt.h"
#include "group/store_wait.h"
#include "node/builtin_callables.h"
#include "node/cpp_registry.h"
#include "node/group_transport.h"
#include "observe/call_report.h"
#include "transport/native/auth/identity.h"
#include "transport/native/auth/tls_credentials.h"

namespace torchrpc {

namespace {

constexpr Duration kSetUpTime = std::chrono::milliseconds(5);  // for the program to set up what its functions use

// A context id has 48 bits for the incarnation. With this divisor they count tens of microseconds, and last until
// 2059.
constexpr uint64_t kNanosecondsPerContext = 10'000;

int64_t firstContext(uint64_t incarnation) {
  return static_cast<int64_t>(incarnation / kNanosecondsPerContext) & kLargestCounter;
}

std::vector<Allowance> allowances(const Node::Options& options) {
  auto all = options.allowed_functions;
  const bool is_one_for_all = all.size() == 1 && all.front().workers == kAllNames;
  if (!all.empty() && !is_one_for_all) all.insert(all.begin(), {options.agent.self.name, std::nullopt});
  return all;
}

const Node::Options& validated(const Node::Options& options) {
  validateSelf(options.agent.self, options.world_size);
  requireUsable(options.agent.limits);
  for (const auto& rule : options.agent.quotas) {
    if (rule.pattern.empty()) throwInvalidArgument("quotas has an empty pattern: write the names of callers, or \"*\"");
  }
  return options;
}

/// Whether its identity makes it a member of the group.
bool startsAsMember(const Node::Options& options) {
  const auto& transport = options.transport;
  if (transport.identity) return transport.identity->holder().isMember();
  return !transport.tls_credentials || transport.tls_credentials->identifySelf(options.agent.self.name).isMember();
}

/// Whether workers prove their names to each other. Then they do not trust each other.
bool provesNames(const Node::Options& options) {
  return options.transport.identity || options.transport.tls_credentials;
}

}  // namespace

void requireUsable(const Limits& limits) {
  constexpr uint64_t kMinBytes = 64 << 10;
  constexpr uint32_t kMinTensors = 64;
  const auto require = [](const char* name, uint64_t value, uint64_t min) {
    if (value >= min) return;
    throwInvalidArgument(
        std::string("limits: ") + name + " must be at least " + std::to_string(min) + ", but is " +
        std::to_string(value));
  };
  require("message_bytes", limits.frame_bytes, kMinBytes);
  require("head_bytes", limits.head_bytes, kMinBytes);
  require("tensor_bytes", limits.segment_bytes, kMinBytes);
  require("tensors", limits.tensors, kMinTensors);
}

Agent::Options Node::agentOptions() const {
  auto options = options_.agent;
  options.incarnation = incarnation_;
  options.world_size = options_.world_size;
  options.liveness = options_.liveness_timeout ? *options_.liveness_timeout : defaultLivenessTimeout();
  options.copies_shared_tensors = options_.agent.copies_shared_tensors || !options_.allowed_functions.empty();
  options.limits.hides_gaps = !options_.allowed_functions.empty() || provesNames(options_);
  options.max_queued_bytes = options_.max_queued_bytes ? *options_.max_queued_bytes : defaultMaxQueuedBytes();
  options.idempotency_window = options_.idempotency_window ? *options_.idempotency_window : defaultIdempotencyWindow();
  return options;
}

AutogradService::Options Node::autogradOptions() const {
  auto options = options_.autograd;
  options.progress_timeout = [this] { return timeout(); };
  options.first_context = firstContext(incarnation_);
  return options;
}

RRefService::Options Node::rrefOptions() {
  auto options = options_.rrefs;
  if (!options.encode_value) {
    options.encode_value = [this](const c10::IValue& value, const WorkerInfo& to) { return replyWith(value, to.id); };
  }
  options.first_number = incarnation_;
  options.group = options_.rendezvous;
  options.restore_timeout = [this] { return timeout(); };
  return options;
}

std::unique_ptr<SlowCalls> Node::makeSlowCalls() {
  const auto limit = options_.slow_call ? *options_.slow_call : defaultSlowCall();
  if (limit == kNoLimit) return nullptr;
  auto report = options_.report_slow_calls;
  if (!report) {
    report = [](const std::vector<SlowCall>& calls) {
      for (const auto& call : calls) log(LogLevel::kWarning, describe(call));
    };
  }
  return std::make_unique<SlowCalls>(agent_, call_metrics_, timer_, limit, std::move(report));
}

Group::Options Node::groupOptions() const {
  return {
      .self =
          {.info = options_.agent.self,
           .world_size = options_.world_size,
           .incarnation = incarnation_,
           .metadata = options_.metadata,
           .devices = encodeDevices(options_.devices),
           .is_member = startsAsMember(options_)},
      .store = store_,
      .secret = options_.transport.secret,
      .stored_secret = options_.stored_secret,
      .served_store = options_.served_store,
      .owns_store = options_.owns_store,
      .are_names_proved = provesNames(options_),
      .timeout = [this] { return timeout(); }};
}

std::shared_ptr<Node> Node::create(const Options& options, StorePtr store) {
  checkRegistrations();
  auto completed = options;
  auto transport = makeGroupTransport(completed, *store);
  const auto destroy = [](Node* node) {
    if (!node->agent_.isInItsProcess()) return;
    if (node->agent_.isOnOwnThread()) {
      log(LogLevel::kError,
          node->self().name + " lives until the end of the process: a function that it runs held it last");
      return;
    }
    std::default_delete<Node>()(node);
  };
  return {std::make_unique<Node>(completed, std::move(store), std::move(transport)).release(), destroy};
}

Node::Node(const Options& options, StorePtr store, std::unique_ptr<Transport> transport)
    : options_(validated(options)),
      allowed_(allowances(options_)),
      store_(std::move(store)),
      incarnation_(Group::newIncarnation(
          options_.agent.self, options_.world_size, options_.takes_place, store_, options_.transport.secret)),
      timeout_(options_.timeout.count()),
      timer_(makeThreadTimer()),
      call_metrics_(agent_, options_.metrics ? *options_.metrics : defaultMetrics()),
      agent_(agentOptions(), std::move(transport), timer_),
      slow_calls_(makeSlowCalls()),
      interceptors_(agent_, options_.interceptors),
      devices_(
          interceptors_,
          {.hold = [this] { return std::make_shared<ActivityToken>(agent_.holdActivity()); },
           .on_unsent_reply = [this](const Message& reply) { rrefs_->abandon(forksIn(reply)); },
           .may_borrow =
               [this, is_member = startsAsMember(options_)](WorkerId id) {
                 const auto other = agent_.directory().find(id);
                 return is_member && other && other->is_member;
               },
           .limits = options_.agent.limits,
           .shares_memory = !provesNames(options_),
           .lends_in_place = options_.shares_device_tensors,
           .borrows_in_place = !agentOptions().copies_shared_tensors}),
      profiler_(devices_),
      autograd_(profiler_, autogradOptions()),
      rrefs_(RRefService::create(autograd_.recorder(), rrefOptions())),
      calls_(autograd_.recorder(), *rrefs_, interceptors_, &agent_.keyedCalls()),
      optim_(profiler_, *rrefs_, [this](int64_t context) { return autograd_.gradients(context); }),
      named_objects_(agent_, *rrefs_, store_, options_.transport.secret),
      inspector_(
          {.agent = agent_,
           .rrefs = *rrefs_,
           .autograd = autograd_,
           .world_size = options_.world_size,
           .stacks = options_.stacks,
           .functions = [this] { return toReport(call_metrics_.snapshot()); }}),
      maps_(agent_.directory(), devices_, options_.devices, options_.world_size),
      group_(
          groupOptions(),
          {.agent = agent_,
           .maps = maps_,
           .on_joined = [this](const WorkerRecord& record) { rrefs_->restore(record.peer()); },
           .on_left =
               [this](const WorkerInfo& worker) {
                 rrefs_->onWorkerLost(worker);
                 autograd_.onWorkerLost(worker);
               }}) {
  agent_.observeCalls(slow_calls_ ? *slow_calls_ : static_cast<CallObserver&>(call_metrics_));
  autograd_.serve(*rrefs_);
  agent_.onLateReply([this](const Message& reply) {
    devices_.onLateReply(reply);
    rrefs_->discard(reply);
  });
  agent_.onUnsentReply([this](const Message& reply) {
    devices_.onUnsentReply(reply);
    rrefs_->abandon(forksIn(reply));
  });
  agent_.awaitReaders([this](WorkerId id) { return devices_.isAwaited(id); });
  agent_.onWorkerLost([this](const WorkerInfo& worker) {
    devices_.onWorkerLost(worker);
    rrefs_->onWorkerLost(worker);
    autograd_.onWorkerLost(worker);
  });
  agent_.onWorkerJoined([this](const Peer& peer) {
    call_metrics_.onWorkerJoined();
    devices_.onWorkerJoined(peer);
    rrefs_->onWorkerJoined(peer);
    autograd_.onWorkerJoined(peer, firstContext(peer.incarnation));
  });
  agent_.addOutstanding([this](std::set<WorkerId>& workers) {
    rrefs_->addOutstanding(workers);
    autograd_.addOutstanding(workers);
    workers.erase(self().id);
  });
  serve(CallableType::kOperator, std::make_shared<BuiltinRunner>(allowed_));
  serve(CallableType::kCpp, std::make_shared<CppRunner>(*this, options_.functions));
  if (!options_.health_address.empty()) {
    health_ = std::make_unique<HealthServer>(options_.health_address, [this] { return whyNotServing(); });
  }
}

std::string Node::whyNotServing() const {
  if (!has_started_) return self().name + " waits for the other workers of its group";
  if (agent_.isEnding()) return self().name + " is shutting down";
  const LentThreads::Mark mark(*agent_.lentThreads());
  return options_.health_check ? options_.health_check() : "";
}

Node::~Node() { shutdown(); }

void Node::serve(CallableType type, const std::shared_ptr<CallableRunner>& runner) { calls_.serve(type, runner); }

void Node::listen() {
  if (std::exchange(is_listening_, true)) return;
  const auto address = agent_.listen();
  card_ = makeCard(address);
  group_.listenAt(address);
}

// The card contains the group's secret only if the user has given none. A process that can read the card could also
// read that secret from the store or derive it from the user's key.
WorkerCard Node::makeCard(const std::string& address) const {
  const auto& transport = options_.transport;
  return WorkerCard(
      {{"name", self().name},
       {"id", std::to_string(self().id)},
       {"address", address},
       {"transport", transport.kind},
       {"encryption", transport.encryption},
       {"secret", transport.secret_is_given ? "" : WorkerCard::hex(transport.secret)},
       {"needs_secret", transport.secret_is_given ? "1" : "0"}});
}

bool Node::takePlace() {
  listen();
  return group_.takePlace(options_.init_timeout);
}

void Node::start() {
  const auto deadline = deadlineAfter(options_.init_timeout);
  listen();
  group_.start(timeUntil(deadline));
  has_started_ = true;
  if (agent_.membership().hasHandlers()) agent_.watchMembers();
}

void Node::onMemberChange(Membership::Handler handler) {
  agent_.membership().addHandler(std::move(handler));
  if (has_started_) agent_.watchMembers();
}

std::map<std::string, std::string> Node::metrics() const {
  auto metrics = agent_.metrics();
  const auto rrefs = rrefs_->debugInfo();
  metrics["rref.owned"] = std::to_string(rrefs.owner_rrefs);
  metrics["rref.forks"] = std::to_string(rrefs.forks);
  metrics.merge(devices_.metrics());
  return metrics;
}

void Node::releaseFirstCalls() {
  if (first_calls_) agent_.releaseAfter(kSetUpTime, first_calls_);
}

void Node::call(WorkerId to, Outgoing&& call, Duration timeout, Messenger::ReplyHandler&& done) {
  if (first_calls_ && !first_calls_->isReleased() && !agent_.isGroupFunction(call.message)) first_calls_->release();
  if (!call.forks.empty()) {
    done = [rrefs = rrefs_, forks = std::move(call.forks), done = std::move(done)](Result<Message> result) {
      if (!result && RRefService::neverUsed(result.error())) rrefs->abandon(forks);
      done(std::move(result));
    };
  }
  messenger().request(to, std::move(call.message), timeout, std::move(done));
}

Message Node::replyWith(const c10::IValue& value, WorkerId to) {
  OutgoingForks forks(*rrefs_, to);
  auto reply = plainReply(value, rrefWriter(forks));
  forks.commit(reply);
  return reply;
}

std::vector<RRefPtr> Node::adoptRRefs(const Message& reply) { return rrefs_->adopt(forksIn(reply)); }

void Node::waitForCapacity(const WorkerInfo& to, Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  while (!agent_.waitForCapacity(kSignalCheckInterval)) {
    checkInterrupt();
    if (std::chrono::steady_clock::now() < deadline) continue;
    throw Error(
        ErrorCode::kTimeout,
        "RPC ran for more than set timeout: too many calls of " + self().name + " are under way, so the call to " +
            to.name + " was not sent",
        to.name);
  }
}

void Node::requireItsProcess() const {
  if (!agent_.isInItsProcess()) throw agent_.forkedError();
}

void Node::requestStop() {
  {
    MutexLock lock(stop_mutex_);
    is_stop_requested_ = true;
  }
  stop_requested_.notify_all();
}

void Node::stopBy(const std::stop_token& token) {
  stop_callback_.emplace(token, [this] { requestStop(); });
}

bool Node::waitForStopRequest(Duration timeout) {
  const ThreadPool::BlockingScope blocking;
  MutexLock lock(stop_mutex_);
  return waitInterruptibly(stop_requested_, lock, deadlineAfter(timeout), [this]() TORCHRPC_REQUIRES(stop_mutex_) {
    return is_stop_requested_;
  });
}

void Node::requireOtherThread() const {
  if (!agent_.isOnOwnThread()) return;
  throwInvalidArgument(
      "a function that " + self().name + " runs cannot shut it down, because the end waits for that function: tell " +
      "the program's main thread to do it");
}

bool Node::leaveAlone(Duration timeout) {
  requireOtherThread();
  group_.markLeft(timeout);
  agent_.beginEnd(timeout, timeout);
  return agent_.waitIdle(timeout);
}

bool Node::drain(Duration limit, Duration timeout) {
  if (!agent_.isInItsProcess()) return true;
  requireOtherThread();
  group_.release(std::min(limit, timeout));
  agent_.beginEnd(limit);
  return agent_.drain(timeout);
}

bool Node::leave(Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  if (!drain(kNoLimit, timeout)) return false;
  if (!agent_.isInItsProcess()) return true;
  autograd_.close();  // ends the passes that block pool threads
  named_objects_.close();
  return agent_.leave(timeUntil(deadline));
}

bool Node::shutdown(Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  if (!leave(timeout)) return false;
  if (!agent_.isInItsProcess()) return true;
  health_.reset();
  inspector_.stop();
  card_ = WorkerCard();
  return agent_.close(timeUntil(deadline));
}

void Node::abandon() {
  if (!agent_.isInItsProcess()) return;
  agent_.beginEnd(Duration::zero());
  if (!agent_.isOnOwnThread()) shutdown(Duration::zero());
  named_objects_.close();  // shutdown() has not reached this step, because functions still run
  agent_.discardQueued();
}

}  // namespace torchrpc
