#pragma once

// A whole worker on a simulated network: what Node puts together, without a rendezvous, whose waits are on the system's
// clock. The test announces members.

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/announcer.h"
#include "autograd/autograd_service.h"
#include "node/allow_list.h"
#include "node/builtin_callables.h"
#include "node/call_service.h"
#include "node/named_objects.h"
#include "optim/optim_service.h"
#include "profiling/profiler.h"
#include "rref/rref_service.h"
#include "testing/simulated_network.h"

namespace torchrpc::test {

/// The incarnation of a worker's nth start is n times as much. Its ids begin there.
constexpr uint64_t kIncarnationStep = 1 << 20;

class SimulatedNode {
 public:
  struct Options {
    WorkerInfo self;
    uint64_t start = 0;  ///< how often it has been started
    Duration liveness = kNoLimit;
    size_t max_queued_bytes = kDefaultMaxQueuedBytes;
    SendFaultPolicy faults;
    int32_t world_size = 0;                   ///< 0: the group grows
    SimulatedNetwork::Handshake handshake{};  ///< with an identity: each worker announces itself only
    Duration idempotency_window = KeyedCalls::kDefaultWindow;
    StorePtr store = c10::make_intrusive<c10d::HashStore>();  ///< of named objects
    /// Whether the worker of an announcement may join, or the error. Empty: any may.
    std::function<Status(SimulatedNode&, const WorkerRecord&)> check_joining{};
    std::function<Message(SimulatedNode&, const c10::IValue&, const WorkerInfo&)> encode_value;
    std::function<void(SimulatedNode&, const WorkerInfo&)> on_lost;
    std::function<std::shared_ptr<CallableRunner>(SimulatedNode&)> make_runner;
    std::function<void(SimulatedNode&, const WorkerInfo&, MemberChange)> on_change;
  };

  SimulatedNode(Simulation& simulation, SimulatedNetwork& network, Options options)
      : incarnation(options.start * kIncarnationStep),
        process(std::make_shared<Simulation::Process>(
            Simulation::Process{.name = options.self.name + "." + std::to_string(options.start)})),
        executor_(simulation.makeExecutor(process)),
        agent_(
            {.self = options.self,
             .incarnation = incarnation,
             .world_size = options.world_size,
             .liveness = options.liveness,
             .max_queued_bytes = options.max_queued_bytes,
             .faults = options.faults,
             .idempotency_window = options.idempotency_window,
             .next_random = [&simulation] { return simulation.below(~uint64_t{0}); },
             .executor = executor_},
            network.makeTransport(process, options.handshake), simulation.makeTimer(process)),
        profiler_(agent_),
        autograd_(profiler_, {.first_context = static_cast<int64_t>(incarnation)}),
        rrefs_(RRefService::create(
            autograd_.recorder(),
            {.encode_value = [this, encode = options.encode_value](
                                 const c10::IValue& value, const WorkerInfo& to) { return encode(*this, value, to); },
             .first_number = incarnation,
             .next_random = [&simulation] { return simulation.below(~uint64_t{0}); }})),
        announcer_(
            agent_,
            {.is_direct = options.handshake.identity.has_value(),
             .accept =
                 [this, check = options.check_joining](const WorkerRecord& record) {
                   auto refusal = check ? check(*this, record) : Status();
                   if (!refusal) admit(record);
                   return refusal;
                 }}),
        interceptors_(agent_, {}),
        calls_(autograd_.recorder(), *rrefs_, interceptors_, &agent_.keyedCalls()),
        optim_(profiler_, *rrefs_, [this](int64_t context) { return autograd_.gradients(context); }),
        named_objects_(agent_, *rrefs_, options.store, ""),
        is_member_(!options.handshake.identity || options.handshake.identity->isMember()),
        world_size_(options.world_size),
        on_lost_(std::move(options.on_lost)) {
    autograd_.serve(*rrefs_);
    agent_.onLateReply([this](const Message& reply) { rrefs_->discard(reply); });
    agent_.onUnsentReply([this](const Message& reply) { rrefs_->abandon(forksIn(reply)); });
    agent_.onWorkerLost([this](const WorkerInfo& worker) {
      on_lost_(*this, worker);
      rrefs_->onWorkerLost(worker);
      autograd_.onWorkerLost(worker);
    });
    agent_.onWorkerJoined([this](const Peer& peer) {
      rrefs_->onWorkerJoined(peer);
      autograd_.onWorkerJoined(peer, static_cast<int64_t>(peer.incarnation));
    });
    agent_.on(Kind::kMemberJoined, Messenger::Where::kLoop, [this](const Request& request, const Responder& responder) {
      announcer_.serve(request, responder);
    });
    agent_.membership().addHandler(
        [this, on_change = std::move(options.on_change)](const WorkerInfo& worker, MemberChange change) {
          on_change(*this, worker, change);
          last_changes[worker.id] = change;
        });
    agent_.addOutstanding([this](std::set<WorkerId>& workers) {
      rrefs_->addOutstanding(workers);
      autograd_.addOutstanding(workers);
      workers.erase(id());
    });
    calls_.serve(CallableType::kCpp, options.make_runner(*this));
    calls_.serve(CallableType::kOperator, std::make_shared<BuiltinRunner>(allowed_operators_));
    address = agent_.listen();
  }
  ~SimulatedNode() { agent_.beginEnd(Duration::zero()); }
  SimulatedNode(const SimulatedNode&) = delete;
  SimulatedNode& operator=(const SimulatedNode&) = delete;

  WorkerId id() const { return agent_.self().id; }
  Agent& agent() { return agent_; }
  AutogradService& autograd() { return autograd_; }
  RRefService& rrefs() { return *rrefs_; }
  OptimService& optim() { return optim_; }
  NamedObjects& namedObjects() { return named_objects_; }
  /// The messenger to send calls through.
  Messenger& messenger() { return autograd_.recorder(); }
  WorkerRecord record() const {
    return {
        .info = agent_.self(),
        .address = address,
        .world_size = world_size_,
        .incarnation = incarnation,
        .metadata = {},
        .is_member = is_member_};
  }

  /// As Node::admit.
  void admit(const WorkerRecord& record) {
    if (record.info.id == id()) return;
    agent_.admit(record);
    rrefs_->restore(record.peer());
  }
  /// As a node that has taken the place of its earlier incarnation.
  void announce(const std::map<WorkerId, WorkerRecord>& members) {
    std::vector<WorkerId> others;
    for (const auto& [to, record] : members) {
      if (to != id()) others.push_back(to);
    }
    announcer_.announce(record(), others, [](const auto&) {});
  }
  /// As Node::expel.
  void expel(const WorkerInfo& worker) {
    agent_.membership().onLeft({worker, agent_.peerId(worker.id).incarnation});
    agent_.directory().remove(worker.id);
    rrefs_->onWorkerLost(worker);
    autograd_.onWorkerLost(worker);
  }

  /// Whether nothing is under way here.
  bool isIdle() { return agent_.waitIdle(Duration::zero()); }
  /// Ends the node as a program does at its end. Returns a text for each fork that other workers still hold.
  std::vector<std::string> close() {
    is_closing = true;
    auto leaks = rrefs_->destroy();
    {
      const auto released = std::exchange(held, {});
    }
    named_objects_.close();
    autograd_.close();
    agent_.beginEnd(Duration::zero());  // its waits take real time, in which nothing happens here
    agent_.close();
    return leaks;
  }

  const uint64_t incarnation;
  const Simulation::ProcessPtr process;
  std::string address;
  bool is_closing = false;                          ///< its program starts nothing any more
  std::map<WorkerId, MemberChange> last_changes{};  ///< as reported to the program
  std::vector<RRefPtr> held{};                      ///< by the program
  at::Tensor parameter{};

 private:
  const std::shared_ptr<Executor> executor_;
  Agent agent_;
  Profiler profiler_;
  AutogradService autograd_;
  const std::shared_ptr<RRefService> rrefs_;
  Announcer announcer_;
  const Interceptors interceptors_;
  CallService calls_;
  const AllowLists allowed_operators_{{{kAllNames, {{"aten::add"}}}}};
  OptimService optim_;
  NamedObjects named_objects_;
  const bool is_member_;
  const int32_t world_size_;
  const std::function<void(SimulatedNode&, const WorkerInfo&)> on_lost_;
};

}  // namespace torchrpc::test
