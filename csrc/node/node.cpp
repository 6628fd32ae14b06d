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

// A worker may be restarted under its id after the clock has been set back. So the store keeps the latest incarnation
// of each id, and the next one is greater by at least this step. Ids of RRefs and contexts start at the incarnation, so
// the step keeps them from being reused.
constexpr int64_t kIncarnationStep = std::chrono::nanoseconds(std::chrono::hours(24)).count();

constexpr Duration kStoreGrace = std::chrono::seconds(2);      // for all workers to read the result of the start
constexpr Duration kSetUpTime = std::chrono::milliseconds(5);  // for the program to set up what its functions use
constexpr auto kStarted = "started";
constexpr Duration kRefusalGrace = std::chrono::seconds(10);  // for all workers to find out that the group cannot form

/// In the store of a group that grows: the latest incarnation that a worker with that id has got.
std::string incarnationKey(WorkerId id) { return "incarnation/" + std::to_string(id); }

/// Returns an incarnation that is greater than those of earlier starts in this group.
uint64_t newIncarnation(const Node::Options& options, const StorePtr& store) {
  const int64_t now = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
  const auto& self = options.agent.self;
  if (options.takes_place) {
    Rendezvous rendezvous(store, {.info = self, .world_size = options.world_size}, options.transport.secret);
    return std::max(static_cast<uint64_t>(now), rendezvous.incarnationInPlace() + kIncarnationStep);
  }
  if (options.world_size > 0) return now;
  const auto key = incarnationKey(self.id);
  const auto latest = store->add(key, 0);
  // Not positive: never set, or set by a foreign process that can write to the store.
  return store->add(key, latest <= 0 ? now : std::max(now - latest, kIncarnationStep));
}

// A context id has 48 bits for the incarnation. With this divisor they count tens of microseconds, and last until 2059.
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
  options.limits.hides_gaps =
      !options_.allowed_functions.empty() || options_.transport.identity || options_.transport.tls_credentials;
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
  return std::make_unique<SlowCalls>(agent_, timer_, limit, std::move(report));
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

namespace {

/// Whether its identity makes it a member of the group.
bool startsAsMember(const Node::Options& options) {
  const auto& transport = options.transport;
  if (transport.identity) return transport.identity->holder().isMember();
  return !transport.tls_credentials || transport.tls_credentials->identifySelf(options.agent.self.name).isMember();
}

}  // namespace

Node::Node(const Options& options, StorePtr store, std::unique_ptr<Transport> transport)
    : options_(validated(options)),
      allowed_(allowances(options_)),
      store_(std::move(store)),
      incarnation_(newIncarnation(options_, store_)),
      timeout_(options_.timeout.count()),
      timer_(makeThreadTimer()),
      call_metrics_(agent_, options_.metrics ? *options_.metrics : defaultMetrics()),
      agent_(agentOptions(), std::move(transport), timer_),
      announcer_(
          agent_,
          {.is_direct = options_.transport.identity || options_.transport.tls_credentials,
           .accept = [this](const WorkerRecord& record) { return accept(record); }}),
      slow_calls_(makeSlowCalls()),
      interceptors_(slow_calls_ ? *slow_calls_ : static_cast<Messenger&>(agent_), options_.interceptors),
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
           // Workers that prove their names do not trust each other.
           .shares_memory = !options_.transport.identity && !options_.transport.tls_credentials,
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
           .functions = [this] { return toReport(call_metrics_.snapshot()); }}) {
  agent_.observeCalls(call_metrics_);
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
    auto* const keeper = worker.id == 0 ? keeper_pointer_.load() : nullptr;
    if (keeper) keeper->onStoreLost();
  });
  agent_.onWorkerJoined([this](const WorkerInfo& worker, uint64_t incarnation) {
    call_metrics_.onWorkerJoined();
    devices_.onWorkerJoined(worker, incarnation);
    rrefs_->onWorkerJoined(worker, incarnation);
    autograd_.onWorkerJoined(worker, firstContext(incarnation));
  });
  agent_.on(Kind::kMemberJoined, Messenger::Where::kLoop, [this](const Request& request, const Responder& responder) {
    announcer_.serve(request, responder);
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

void Node::beginRendezvous() {
  const WorkerRecord self{
      .info = options_.agent.self,
      .address = agent_.listen(),
      .world_size = options_.world_size,
      .incarnation = incarnation_,
      .metadata = options_.metadata,
      .devices = encodeDevices(options_.devices),
      .is_member = startsAsMember(options_)};
  card_ = makeCard(self.address);
  rendezvous_ = std::make_unique<Rendezvous>(store_, self, options_.transport.secret);
  rendezvous_->setServedAt(options_.served_store);
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
  beginRendezvous();
  const auto any_alive = [this](const std::vector<WorkerRecord>& records) { return agent_.anyAnswersPing(records); };
  auto records = rendezvous_->takePlace(options_.init_timeout, any_alive);
  if (!records) return false;
  place_ = *std::move(records);
  return true;
}

template <typename Step>
void Node::overStore(const Step& step) const try {
  step();
} catch (const c10::Error& error) {
  throw storeLostError(self().name, options_.served_store, error);
}

void Node::start() {
  const auto deadline = deadlineAfter(options_.init_timeout);
  if (!place_.empty()) {
    for (const auto& record : place_) agent_.admit(record, /*is_news=*/false);
    checkDevices();
    updateDeviceMaps();
    announce(place_, timeUntil(deadline));
  } else {
    overStore([&] { joinOthers(deadline); });
  }
  if (options_.served_store && isStaticGroup() && self().id > 0) {
    keeper_ = std::make_unique<StoreKeeper>(*options_.served_store, rendezvous_->ownEntry(), [this] {
      return rendezvous_->entries(agent_.directory().records(), options_.stored_secret);
    });
    // The first few ranks connect to rank 0, to notice when it ends.
    if (self().id <= kLastStoreKeeper) {
      keeper_pointer_ = keeper_.get();
      agent_.watch({0});
    }
  }
  has_started_ = true;
  if (agent_.membership().hasHandlers()) agent_.watchMembers();
}

void Node::joinOthers(TimePoint deadline) {
  beginRendezvous();
  const auto limit = timeUntil(deadline);
  if (isStaticGroup()) {
    for (const auto& record : rendezvous_->meetAll(limit)) agent_.admit(record, /*is_news=*/false);
    try {
      checkDevices();
    } catch (const Error&) {
      endRefusedGroup();
      throw;
    }
    updateDeviceMaps();
    // No worker may call another before that one knows the addresses and the device maps of all.
    rendezvous_->sumOverAll("ready", 0, timeUntil(deadline), {}, absent_);
    // Worker 0 returns first: programs often set up there what the others' first calls use. It waits for the others to
    // have read the store when it ends.
    must_release_store_ = self().id == 0;
    if (!must_release_store_) rendezvous_->releaseStore(kStarted, kStoreGrace);
  } else {
    const auto any_alive = [this](const auto& records) { return agent_.anyAnswersPing(records); };
    for (const auto& record : rendezvous_->joinGroup(limit, any_alive)) agent_.admit(record, /*is_news=*/false);
    try {
      checkDevices();
    } catch (const Error&) {
      rendezvous_->leaveGroup(timeUntil(deadline));
      throw;
    }
    updateDeviceMaps();
  }
}

void Node::endRefusedGroup() {
  // All workers refuse the group for the same reason. They wait for each other, so that each worker finds the reason
  // before the group, or the process that serves the store, ends.
  try {
    rendezvous_->sumOverAll("refused", 0, kRefusalGrace, {}, absent_);
    rendezvous_->releaseStore("refused_read", kStoreGrace);
  } catch (const std::exception& error) {
    log(LogLevel::kDebug, self().name + " does not wait longer for the others to refuse the group: " + textOf(error));
  }
  rendezvous_->markEnded();
}

// Note [Device maps of a group]
// Each worker publishes its devices and maps in its record, and computes its own maps from the records of all. In a
// group of fixed size it does so before the barrier "ready", so every worker has its maps before another worker can
// send it a tensor by a map. A worker that joins later, or takes the place of a lost one, is known to the others before
// it makes calls. They compute their maps again when they add its record, and refuse a record that does not fit theirs.

GroupDevices Node::groupDevices() {
  GroupDevices group;
  for (const auto& [name, bytes] : agent_.directory().devices()) group.emplace(name, decodeDevices(bytes, name));
  group[self().name] = options_.devices;  // others may join before this worker knows the group
  return group;
}

void Node::checkDevices(const WorkerRecord* joining) {
  auto group = groupDevices();
  if (joining) group[joining->info.name] = decodeDevices(joining->devices, joining->info.name);
  requireConsistent(group, static_cast<int32_t>(group.size()) == options_.world_size);
}

void Node::updateDeviceMaps() {
  MutexLock lock(device_maps_mutex_);
  devices_.use(mapsOf(self().name, groupDevices()));
}

void Node::add(const WorkerRecord& record) {
  agent_.admit(record);
  updateDeviceMaps();
  rrefs_->restore(record.info, record.incarnation);
}

void Node::announce(const std::vector<WorkerRecord>& records, Duration timeout) {
  struct Outcome {
    Mutex mutex{};
    CondVar changed{};
    std::optional<Result<std::vector<WorkerId>>> unreached TORCHRPC_GUARDED_BY(mutex){};
  };
  const auto outcome = std::make_shared<Outcome>();
  std::vector<WorkerId> others;
  for (const auto& record : records) {
    if (record.info.id != self().id) others.push_back(record.info.id);
  }
  announcer_.announce(records.at(self().id), others, [outcome](Result<std::vector<WorkerId>> unreached) {
    {
      MutexLock lock(outcome->mutex);
      outcome->unreached = std::move(unreached);
    }
    outcome->changed.notify_all();
  });
  std::string names;
  {
    MutexLock lock(outcome->mutex);
    const auto is_over = [&]() TORCHRPC_REQUIRES(outcome->mutex) { return outcome->unreached.has_value(); };
    if (!waitInterruptibly(outcome->changed, lock, deadlineAfter(timeout), is_over)) return;
    for (const auto id : std::move(*outcome->unreached).take()) {
      names += (names.empty() ? "" : ", ") + records.at(id).info.name;
    }
  }
  if (names.empty()) return;
  log(LogLevel::kWarning, self().name + " takes its place in a group of which it cannot reach " + names);
}

Status Node::accept(const WorkerRecord& record) {
  if (!isStaticGroup() || record.info.id < 0 || record.info.id >= options_.world_size) {
    return Error(
        ErrorCode::kRendezvous,
        "the group of " + self().name + " has no place for " + toString(record.info) +
            ": an announcement is only for a worker that takes its place in a group of a fixed size",
        self().name);
  }
  if (record.world_size != options_.world_size) {
    return Error(
        ErrorCode::kRendezvous,
        toString(record.info) + " has another world_size than the group of " + self().name + ": pass the same to all",
        self().name);
  }
  try {
    checkDevices(&record);
  } catch (const Error& error) {
    return Error(ErrorCode::kRendezvous, error.text(), record.info.name);
  }
  add(record);
  return std::nullopt;
}

void Node::renewStore() {
  if (!keeper_) return;
  // Checks first whether a process serves the store, because c10d's client writes to standard error when it notices
  // the end of the server.
  const auto& served = *options_.served_store;
  const bool is_served = waitForStore(served.host, served.port, Duration::zero()).empty();
  try {
    store_is_lost_ = store_is_lost_ || !is_served || !rendezvous_->storeAnswers();
    if (!store_is_lost_) return;
    const auto store = is_served ? keeper_->findGroup(Duration::zero()) : nullptr;
    if (store) {
      rendezvous_->setStore(store);
      store_is_lost_ = false;
    }
  } catch (const std::exception& error) {
    log(LogLevel::kDebug, "the store is not found again: " + textOf(error));
  }
  if (!store_is_lost_) return;
  const auto server = agent_.worker(0);
  throw Error(
      ErrorCode::kWorkerLost,
      self().name + " cannot meet the others any more: " + server.name + ", which served the group's store at " +
          served.host + ":" + std::to_string(served.port) + ", is lost",
      server.name);
}

template <typename Step>
void Node::meet(const Step& step) {
  renewStore();
  overStore(step);
  requireAll();
}

void Node::onMemberChange(Membership::Handler handler) {
  agent_.membership().addHandler(std::move(handler));
  if (has_started_) agent_.watchMembers();
}

namespace {

std::string listOf(const std::vector<WorkerInfo>& workers) {
  std::string out;
  for (const auto& worker : workers) out += (out.empty() ? "" : ", ") + worker.name;
  return out.empty() ? "none" : out;
}

}  // namespace

WorkerInfo Node::worker(const std::string& name) const {
  if (auto info = agent_.directory().info(name)) return *std::move(info);
  throw Error(
      ErrorCode::kUnknownWorker,
      "Unknown destination worker " + (name.empty() ? "with an empty name" : name) +
          ": could not find destination in the RPC group of " + self().name + ", whose workers are " +
          listOf(workers()),
      name);
}

WorkerRecord Node::record(WorkerId id) const {
  if (auto record = agent_.directory().find(id)) return *std::move(record);
  throw Error(
      ErrorCode::kUnknownWorker,
      "Unknown destination worker id " + std::to_string(id) + ": could not find destination in the RPC group of " +
          self().name + ", whose workers are " + listOf(workers()));
}

WorkerInfo Node::worker(WorkerId id) const { return record(id).info; }

std::string Node::metadata(WorkerId id) const { return record(id).metadata; }

bool Node::isMember(WorkerId id) const { return record(id).is_member; }

std::map<std::string, std::string> Node::metrics() const {
  auto metrics = agent_.metrics();
  const auto rrefs = rrefs_->debugInfo();
  metrics["rref.owned"] = std::to_string(rrefs.owner_rrefs);
  metrics["rref.forks"] = std::to_string(rrefs.forks);
  metrics.merge(devices_.metrics());
  return metrics;
}

void Node::admit(const WorkerInfo& worker, const Peer* caller) {
  if (worker.id == self().id) return;
  const auto record = rendezvous_->lookUp(worker.id, timeout());
  if (record.info != worker) {
    throw Error(
        ErrorCode::kRendezvous,
        toString(worker) + " cannot join the group of " + self().name + ": the store has it as " +
            toString(record.info));
  }
  if (caller) {
    caller->requireOwn(record, self().name);
    // The next worker with this id gets a greater one than the store has given out, and has to replace this worker.
    const auto given = store_->add(incarnationKey(worker.id), 0);
    if (given < 0 || record.incarnation > static_cast<uint64_t>(given)) {
      throw Error(
          ErrorCode::kNotAllowed,
          self().name + " does not admit " + toString(worker) +
              " with a greater incarnation than the group's store has given to a worker with this id",
          self().name);
    }
  }
  for (const auto& other : livingWorkers()) {
    if (other == worker || (other.id != worker.id && other.name != worker.name)) continue;
    throw Error(
        ErrorCode::kRendezvous,
        toString(worker) + " cannot join the group of " + self().name + ", in which " + toString(other) + " lives");
  }
  checkDevices(&record);
  for (const auto& other : workers()) {
    if (other.name == worker.name && other.id != worker.id) forget(other);  // it is lost: the name has a new id
  }
  add(record);
}

void Node::expel(const WorkerInfo& worker, const Peer* caller) {
  if (worker.id == self().id) return;
  if (caller) caller->requireOwn(record(worker.id), self().name);
  // Its connection stays open, because it carries the reply to the call that removes the worker; it closes with the
  // worker. But the worker counts as lost from now on, because it may have joined again before its connection ends.
  forget(worker);
}

void Node::forget(const WorkerInfo& worker) {
  agent_.membership().onLeft(worker, agent_.incarnation(worker.id));
  agent_.directory().remove(worker.id);
  rrefs_->onWorkerLost(worker);
  autograd_.onWorkerLost(worker);
}

void Node::releaseFirstCalls() {
  if (first_calls_) agent_.releaseAfter(kSetUpTime, first_calls_);
}

void Node::call(WorkerId to, Outgoing call, Duration timeout, Messenger::ReplyHandler done) {
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

void Node::barrier(const std::string& name, Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  meet([&] {
    rendezvous_->sumOverAll(name, 0, timeout, lostAmong(), absent_);
    if (absent_.empty()) return;
    // This worker may end the process that serves the store, so wait until the others have read who is absent.
    leaveStore(name + "_read", std::min<Duration>(std::chrono::seconds(1), timeUntil(deadline)));
  });
}

Rendezvous::LostAmong Node::lostAmong() {
  return [this](std::vector<WorkerId> workers) {
    if (agent_.isClosing()) throw Error(ErrorCode::kShutdown, self().name + " has shut down meanwhile");
    auto gone = agent_.lostAmong(workers);
    if (!rendezvous_->hasAnyLeft()) return gone;
    // The store tells at once that a worker has left; this worker may not be connected to it.
    std::erase_if(workers, [&](WorkerId id) {
      return std::ranges::find(gone, id) == gone.end() && !rendezvous_->hasLeft(id, agent_.incarnation(id));
    });
    return workers;
  };
}

void Node::leaveStore(const std::string& phase, Duration grace) {
  auto lost = absent_;
  std::erase_if(lost, [this](WorkerId id) { return rendezvous_->hasLeft(id, agent_.incarnation(id)); });
  if (keeper_) keeper_->stop();  // the store is to end
  rendezvous_->releaseStore(phase, grace, absent_);
  absent_ = std::move(lost);
}

void Node::requireAll() const {
  if (absent_.empty()) return;
  std::vector<WorkerInfo> workers;
  for (const auto id : absent_) workers.push_back(agent_.worker(id));
  throw Error(
      ErrorCode::kWorkerLost, self().name + " has left the group without " + listOf(workers) + ", lost before the end",
      workers.front().name);
}

void Node::join(Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  const auto busy = [&] {
    return Error(
        ErrorCode::kTimeout, "calls were still under way on " + self().name + " when the time-out of shutdown expired");
  };
  if (!isStaticGroup()) {
    if (!agent_.waitIdle(timeUntil(deadline))) throw busy();
    agent_.expectDisconnects(true);
    rendezvous_->leaveGroup(timeUntil(deadline));
    return;
  }
  // The group is idle once every worker has been idle and no worker has begun anything since the round before.
  meet([&] {
    int64_t seen = -1;
    for (int round = 0;; ++round) {
      if (!agent_.waitIdle(timeUntil(deadline))) throw busy();
      const auto begun = agent_.activityCount();
      // The first worker that finds out that this was the last round closes its connections at once.
      agent_.expectDisconnects(true);
      const auto sum =
          rendezvous_->sumOverAll("join" + std::to_string(round), begun, timeUntil(deadline), lostAmong(), absent_);
      if (sum == seen) break;
      agent_.expectDisconnects(false);
      seen = sum;
    }
    rendezvous_->markEnded();
    const Duration grace = std::chrono::seconds(absent_.empty() ? 5 : 1);
    leaveStore("left", std::min(grace, timeUntil(deadline)));
  });
}

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
  if (isStaticGroup()) rendezvous_->markLeft(timeout);
  agent_.beginEnd(timeout, timeout);
  return agent_.waitIdle(timeout);
}

bool Node::drain(Duration limit, Duration timeout) {
  if (!agent_.isInItsProcess()) return true;
  requireOtherThread();
  if (keeper_) keeper_->stop();
  const auto grace = std::min({limit, timeout, kStoreGrace});
  if (options_.owns_store) limitRequests(*store_, grace);
  if (std::exchange(must_release_store_, false)) rendezvous_->releaseStore(kStarted, grace, absent_);
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
