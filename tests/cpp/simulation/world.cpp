#include "simulation/world.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <sstream>

#include "rref/outgoing_forks.h"
#include "wire/codec.h"

namespace torchrpc::test {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

constexpr size_t kMostWorkers = 5;
constexpr size_t kShortestProgram = 20;
constexpr size_t kLongestProgram = 120;
constexpr Duration kLiveness = seconds(5);
/// Longer, and others may take the process for lost.
constexpr Duration kLongestStop = milliseconds(1500);
constexpr Duration kLongestAnnouncement = milliseconds(50);
constexpr Duration kGraceOfLeaving = seconds(10);
constexpr size_t kMaxQueuedBytes = 512 << 10;
constexpr size_t kLargestTensorBytes = 1 << 20;

std::string nameOf(WorkerId id) { return "worker" + std::to_string(id); }

std::shared_ptr<UserRRef> asUser(const RRefPtr& rref) { return std::dynamic_pointer_cast<UserRRef>(rref); }
std::shared_ptr<OwnerRRef> asOwner(const RRefPtr& rref) { return std::dynamic_pointer_cast<OwnerRRef>(rref); }

bool isUsable(const RRefPtr& rref) {
  if (const auto user = asUser(rref)) return !user->failure() && !user->deleted();
  return !asOwner(rref)->creationFailure();
}

int64_t numberOf(const c10::IValue& value) { return value.toTensor().const_data_ptr<int64_t>()[0]; }

/// "0:3721", the creator and a part of its number.
std::string shortText(const GloballyUniqueId& id) {
  return std::to_string(id.created_on) + ":" + std::to_string(id.key % 10000);
}

Message payloadOf(Kind kind, uint64_t number) {
  Message message{.kind = kind};
  Writer(message.payload).put(number);
  return message;
}

/// What a forward step computes, here and on the workers.
at::Tensor layer(const at::Tensor& input, const at::Tensor& parameter) { return (input * parameter).tanh(); }

}  // namespace

/// The program's functions on one node.
class World::Runner final : public CallableRunner {
 public:
  Runner(World& world, SimulatedNode& node) : world_(world), node_(node) {}

  void call(Invocation&& invocation, const Responder& responder) override {
    world_.serve(node_, std::move(invocation), responder);
  }
  void evaluate(Invocation&& invocation, ValueHandler done) override {
    if (!world_.execute(node_, invocation)) return done(Error(ErrorCode::kProtocol, "an unknown call"));
    for (const auto& rref : invocation.rrefs) {
      if (!world_.is_healed_ && world_.chance(30)) node_.held.push_back(rref);
    }
    if (world_.chance(10)) return done(Error(ErrorCode::kUserException, "the function throws"));
    const auto id = decodeRemoteResult(*invocation.message.header(HeaderKind::kRRefResult)).rref;
    auto finish = [this, id, done = std::move(done)] { done(world_.makeValue(id, node_)); };
    if (world_.chance(60)) return finish();
    node_.agent().postAfter(world_.simulation_.between({}, seconds(2)), std::move(finish));
  }

 private:
  World& world_;
  SimulatedNode& node_;
};

World::World(uint64_t seed, std::ostream* trace) : simulation_(seed, trace), network_(simulation_) {
  parts_.rrefs = chance(75);
  parts_.autograd = chance(40);
  parts_.cuts = chance(35);
  parts_.crashes = chance(35);
  parts_.joins = chance(40);
  parts_.send_faults = chance(35);
  parts_.stops = chance(25);
  parts_.large_messages = chance(6);
  parts_.repeats = chance(50);
  nodes_.resize(2 + below(3));
  starts_.resize(nodes_.size());
  has_ended_.resize(nodes_.size());
  SimulatedNetwork::Latency latency;
  if (chance(50)) latency.slow_percent = 1 + static_cast<unsigned>(below(20));
  if (chance(20)) latency.longest = milliseconds(30);
  network_.setLatency(latency);
}

World::~World() = default;

// --- helpers ---

void World::say(const SimulatedNode& node, const std::string& text) {
  if (simulation_.isTracing()) simulation_.trace(node.process->name + "  " + text);
}

std::vector<SimulatedNode*> World::liveNodes() {
  std::vector<SimulatedNode*> live;
  for (const auto& each : nodes_) {
    if (each && !each->is_closing) live.push_back(each.get());
  }
  return live;
}

SimulatedNode* World::anyNode() {
  auto live = liveNodes();
  // The program of a worker that joins starts when the others know it.
  std::erase_if(live, [&live = std::as_const(nodes_)](const SimulatedNode* joining) {
    return !std::ranges::all_of(live, [joining](const NodePtr& each) {
      if (!each || each.get() == joining) return true;
      const auto known = each->agent().directory().find(joining->id());
      return known && known->incarnation == joining->incarnation;
    });
  });
  return live.empty() ? nullptr : live[below(live.size())];
}

bool World::isLive(WorkerId id, uint64_t incarnation) {
  const auto* found = node(id);
  return found && found->incarnation == incarnation && !found->process->has_crashed;
}

bool World::wereSevered(WorkerId one, WorkerId other) const {
  return severed_.contains({std::min(one, other), std::max(one, other)});
}

void World::sever(WorkerId one, WorkerId other) {
  severed_.insert({std::min(one, other), std::max(one, other)});
  ++troubles_;
}

void World::expect(bool holds, const std::string& text) {
  if (!holds) simulation_.fail(text);
}

// --- members ---

void World::start(WorkerId id) {
  const auto index = static_cast<size_t>(id);
  if (index >= nodes_.size()) {
    nodes_.resize(index + 1);
    starts_.resize(index + 1);
    has_ended_.resize(index + 1);
  }
  if (nodes_[index]) return;
  auto faults = [this](const Message& message) -> SendFault {
    if (is_healed_ || !parts_.send_faults) return {};
    const bool is_reliable = isReliable(message.kind);
    if (!is_reliable && !carriesValues(message.kind)) return {};
    if (chance(is_reliable ? 10 : 2)) {
      ++troubles_;
      ++unsent_;
      count("requests that are not sent");
      return {.fail = true};
    }
    if (chance(10)) return {.delay = simulation_.between({}, milliseconds(200))};
    return {};
  };
  nodes_[index] = std::make_shared<SimulatedNode>(
      simulation_, network_,
      SimulatedNode::Options{
          .self = {nameOf(id), id},
          .start = ++starts_[index],
          .liveness = kLiveness,
          .max_queued_bytes = kMaxQueuedBytes,
          .faults = std::move(faults),
          .encode_value = [this](
                              auto& node, const auto& value, const auto& to) { return encodeValue(node, value, to); },
          .on_lost = [this](auto& node, const auto& worker) { onLost(node, worker); },
          .make_runner = [this](auto& node) { return std::make_shared<Runner>(*this, node); },
          .on_change = [this](auto& node, const auto& worker, auto change) { onChange(node, worker, change); }});
  auto& fresh = *nodes_[index];
  fresh.parameter = newParameter();
  count("workers started");
  say(fresh, "starts");
  members_[id] = fresh.record();
  for (const auto& [other, record] : members_) fresh.agent().admit(record, /*is_news=*/false);
  // A restarted worker tells the others itself.
  if (starts_[index] > 1 && chance(50)) {
    count("places taken");
    fresh.announce(members_);
  } else {
    announce(fresh.record());
  }
}

void World::onChange(SimulatedNode& node, const WorkerInfo& worker, MemberChange change) {
  const auto text = worker.name + " is reported as " + std::string(name(change)) + " to " + nameOf(node.id());
  if (simulation_.isTracing()) simulation_.trace(text);
  count("changes of members reported as " + std::string(name(change)));
  const auto last = node.last_changes.find(worker.id);
  const bool is_gone =
      last != node.last_changes.end() && (last->second == MemberChange::kLost || last->second == MemberChange::kLeft);
  expect(worker.id != node.id(), text);
  if (change == MemberChange::kLost) expect(!is_gone, text + ", although it was gone");
  if (change == MemberChange::kJoined)
    expect(is_gone || last == node.last_changes.end(), text + ", although it was there");
  if (change == MemberChange::kReplaced) expect(starts_[static_cast<size_t>(worker.id)] > 1, text);
}

void World::announce(const WorkerRecord& record) {
  for (const auto& node : nodes_) {
    auto* each = node.get();
    if (!each || each->id() == record.info.id) continue;
    simulation_.after(simulation_.between({}, kLongestAnnouncement), each->process, [this, each, id = record.info.id] {
      const auto latest = members_.find(id);  // it may have left or been started again meanwhile
      if (latest == members_.end()) return;
      say(*each,
          "learns that " + latest->second.info.name + "." +
              std::to_string(latest->second.incarnation / kIncarnationStep) + " has joined");
      each->admit(latest->second);
    });
  }
}

void World::onLost(SimulatedNode& node, const WorkerInfo& worker) {
  say(node, "loses " + worker.name);
  count("lost workers reported");
  const bool may_be_lost = wereSevered(node.id(), worker.id) || has_ended_[static_cast<size_t>(worker.id)];
  expect(
      node.is_closing || may_be_lost,
      nameOf(node.id()) + " has lost " + worker.name + ", which lives and is reachable");
}

void World::leave(const NodePtr& node, TimePoint deadline) {
  if (this->node(node->id()) != node.get()) return;  // it has crashed meanwhile
  node->is_closing = true;
  {
    const auto released = std::exchange(node->held, {});
  }
  const auto info = node->rrefs().debugInfo();
  const bool is_idle = node->isIdle() && info.owner_rrefs + info.pending_users + info.pending_children == 0;
  if (!is_idle && simulation_.now() < deadline) {
    simulation_.after(milliseconds(20), nullptr, [this, node, deadline] { leave(node, deadline); });
    return;
  }
  count(is_idle ? "workers left when idle" : "workers left while busy");
  node->agent().expectDisconnects(true);
  members_.erase(node->id());
  for (const auto& other : nodes_) {
    auto* each = other.get();
    if (!each || each == node.get()) continue;
    simulation_.after(simulation_.between({}, kLongestAnnouncement), each->process, [this, each, id = node->id()] {
      if (!members_.contains(id)) each->expel({nameOf(id), id});
    });
  }
  end(node->id(), /*is_crash=*/false);
}

void World::end(WorkerId id, bool is_crash) {
  const auto index = static_cast<size_t>(id);
  auto ended = std::exchange(nodes_[index], nullptr);
  const auto incarnation = ended->incarnation;
  has_ended_[index] = true;
  ++troubles_;
  for (auto& [number, call] : calls_) {
    if (call.from == id && call.from_incarnation == incarnation) call.caller_ended = true;
  }
  if (is_crash) {
    const auto kind = chance(60) ? SimulatedNetwork::Crash::kReset : SimulatedNetwork::Crash::kSilent;
    say(*ended, kind == SimulatedNetwork::Crash::kReset ? "CRASHES" : "CRASHES without a word");
    count(kind == SimulatedNetwork::Crash::kReset ? "crashes" : "silent crashes");
    network_.crash(ended->process, kind);
  } else {
    say(*ended, "leaves");
  }
  for (const auto& leak : ended->close()) say(*ended, leak);
  simulation_.crash(*ended->process);
}

// --- calls ---

Duration World::anyTimeout() {
  if (chance(30)) return kNoLimit;
  return chance(50) ? simulation_.between(milliseconds(1), milliseconds(300)) : simulation_.between({}, seconds(20));
}

World::RRefs World::someHeld(SimulatedNode& node, size_t most) {
  RRefs some;
  if (node.held.empty() || !parts_.rrefs) return some;
  for (size_t n = below(most + 1); n > 0; --n) {
    const auto& rref = node.held[below(node.held.size())];
    if (isUsable(rref)) some.push_back(rref);
  }
  return some;
}

std::vector<at::Tensor> World::someTensors() {
  if (!parts_.large_messages || is_healed_ || chance(50)) return {};
  return {at::zeros({static_cast<int64_t>(1 + below(kLargestTensorBytes))}, at::kByte)};
}

std::vector<RRefFork> World::attach(SimulatedNode& node, Message& message, const RRefs& rrefs, WorkerId to) {
  OutgoingForks forks(node.rrefs(), to);
  for (const auto& rref : rrefs) forks.add(rref);
  auto made = forks.commit(message);
  if (simulation_.isTracing()) {
    for (const auto& each : made) {
      say(node, "forks RRef " + shortText(each.rref) + " for " + nameOf(to) + ": fork " + shortText(each.fork));
    }
  }
  return made;
}

World::Call& World::newCall(SimulatedNode& from, WorkerId to, Duration timeout) {
  const auto number = next_call_++;
  const auto known = from.agent().directory().find(to);
  auto& call = calls_[number];
  call = {
      .number = number,
      .from = from.id(),
      .from_incarnation = from.incarnation,
      .to = to,
      .to_incarnation = known ? known->incarnation : 0,
      .started = simulation_.now(),
      .timeout = timeout};
  return call;
}

void World::complete(Call& call, const Result<Message>& reply) {
  const auto text = "call " + std::to_string(call.number) + " of " + nameOf(call.from);
  if (simulation_.isTracing()) {
    simulation_.trace(text + (reply ? " is answered" : " fails: " + reply.error().text()));
  }
  expect(++call.completions == 1, text + " is completed twice");
  count(reply ? "calls answered" : "calls failed");
  if (call.caller_ended) return;
  const auto deadline = deadlineAfter(call.timeout, call.started);
  const auto now = simulation_.now();
  expect(parts_.stops || now <= deadline, text + " is completed after its deadline");
  if (reply) {
    expect(
        call.executions == 1 || (call.executions > 1 && call.may_run_again),
        text + " is answered, but its function has not run once");
  } else if (reply.error().code() == ErrorCode::kTimeout) {
    expect(now >= deadline, text + " times out before its deadline");
  }
}

void World::request(
    SimulatedNode& from, Call& call, Kind kind, const RRefs& rrefs, std::vector<at::Tensor> tensors,
    Messenger::ReplyHandler done) {
  auto message = payloadOf(kind, call.number);
  message.tensors = std::move(tensors);
  std::vector<RRefFork> forks;
  try {
    forks = attach(from, message, rrefs, call.to);
  } catch (const Error&) {  // one of them has failed meanwhile
  }
  if (simulation_.isTracing()) {
    say(from,
        "starts call " + std::to_string(call.number) + " to " + nameOf(call.to) + " with " +
            std::to_string(forks.size()) + " RRefs");
  }
  from.messenger().request(
      call.to, std::move(message), call.timeout,
      [this, &from, &call, forks = std::move(forks), done = std::move(done)](Result<Message> reply) {
        complete(call, reply);
        if (!reply && RRefService::neverUsed(reply.error())) from.rrefs().abandon(forks);
        done(std::move(reply));
      });
}

void World::keep(SimulatedNode& node, const Message& reply, unsigned percent) {
  node.rrefs().adopt(forksIn(reply), /*wait_for_owner=*/false, [&](Result<RRefs> rrefs) {
    if (!rrefs || is_healed_ || node.is_closing) return;
    for (auto& rref : rrefs.value()) {
      if (chance(percent)) node.held.push_back(std::move(rref));
    }
  });
}

void World::call(SimulatedNode& node) {
  auto& call = newCall(node, anyId(), anyTimeout());
  request(node, call, Kind::kCppCall, someHeld(node, 3), someTensors(), [this, &node](const Result<Message>& reply) {
    if (reply) keep(node, reply.value(), 70);
  });
}

void World::repeatableCall(SimulatedNode& node) {
  auto& call = newCall(node, anyId(), anyTimeout());
  const bool has_key = chance(50);
  call.repetition = std::make_shared<Repetition>(Repetition{
      .policy =
          {.retries = static_cast<uint32_t>(has_key ? below(6) : 1 + below(6)),
           .first_delay = simulation_.between(milliseconds(1), milliseconds(100)),
           .breaker_losses = chance(50) ? 0U : 3U},
      .key = has_key ? "call " + std::to_string(call.number) : std::string()});
  if (has_key) call.tries_by_hand = below(3);
  call.tensors = someTensors();
  count(has_key ? "calls with a key" : "calls with retries");
  sendRepeatable(node, call);
}

void World::sendRepeatable(SimulatedNode& node, Call& call) {
  auto message = payloadOf(Kind::kCppCall, call.number);
  message.tensors = call.tensors;
  message.repetition = call.repetition;
  call.started = simulation_.now();
  if (simulation_.isTracing()) {
    say(node,
        "starts call " + std::to_string(call.number) + " to " + nameOf(call.to) + " with " +
            std::to_string(call.repetition->policy.retries) + " retries");
  }
  node.messenger().request(
      call.to, std::move(message), call.timeout, [this, &node, &call](const Result<Message>& reply) {
        if (!reply && call.tries_by_hand > 0 && !call.caller_ended && !node.is_closing && !is_healed_) {
          --call.tries_by_hand;
          call.may_run_again = true;
          count("calls that the program makes again");
          node.agent().postAfter(
              simulation_.between({}, seconds(1)), [this, &node, &call] { sendRepeatable(node, call); });
          return;
        }
        if (reply) keep(node, reply.value(), 50);
        complete(call, reply);
      });
}

World::Call* World::execute(SimulatedNode& node, const Invocation& invocation) {
  const auto number = Reader(invocation.message.payload).get<uint64_t>();
  auto& call = calls_.at(number);
  const auto text = "call " + std::to_string(number) + " of " + nameOf(call.from);
  if (simulation_.isTracing()) say(node, "runs " + text);
  expect(++call.executions_on[node.incarnation] == 1, text + " runs twice on " + node.process->name);
  expect(++call.executions == 1 || call.may_run_again, text + " runs twice");
  expect(call.to == node.id(), text + " to " + nameOf(call.to) + " runs on " + nameOf(node.id()));
  // A call that may be repeated may first reach the worker when it has been started again.
  expect(
      call.repetition || call.to_incarnation == 0 || call.to_incarnation == node.incarnation,
      text + " to incarnation " + std::to_string(call.to_incarnation) + " runs on " + node.process->name);
  expect(invocation.from.id == call.from, text + " arrives from " + invocation.from.name);
  checkArguments(node, invocation.rrefs);
  return &call;
}

void World::serve(SimulatedNode& node, Invocation&& invocation, const Responder& responder) {
  const auto* call = execute(node, invocation);
  if (!call->chain.empty()) return serveForward(node, *call, invocation, responder);
  for (const auto& rref : invocation.rrefs) {
    if (!is_healed_ && !node.is_closing && chance(60)) node.held.push_back(rref);
  }
  auto answer = [this, &node, from = invocation.from, responder, args = std::move(invocation.rrefs)] {
    this->answer(node, from, responder, chance(30), args);
  };
  if (chance(15)) return responder.fail(Error(ErrorCode::kUserException, "the function throws"));
  if (chance(25) && !node.is_closing) {
    auto& nested = newCall(node, anyId(), anyTimeout());
    request(
        node, nested, Kind::kCppCall, someHeld(node, 1), someTensors(),
        [this, &node, answer = std::move(answer)](const Result<Message>& reply) {
          if (reply) keep(node, reply.value(), 30);
          node.agent().post(answer);
        });
    return;
  }
  if (chance(30)) {
    node.agent().postAfter(simulation_.between({}, chance(20) ? seconds(20) : milliseconds(100)), std::move(answer));
    return;
  }
  answer();
}

void World::answer(
    SimulatedNode& node, const WorkerInfo& to, const Responder& responder, bool with_first, const RRefs& args) {
  try {
    Message reply{.kind = Kind::kReply, .tensors = someTensors()};
    auto results = chance(50) ? someHeld(node, 2) : RRefs();
    if (!args.empty() && with_first && isUsable(args[0])) results.push_back(args[0]);
    attach(node, reply, results, to.id);
    responder.reply(std::move(reply));
  } catch (const Error& error) {
    responder.fail(error);
  }
}

// --- RRefs ---

c10::IValue World::makeValue(const RRefId& id, SimulatedNode& node) {
  auto& value = values_[id];
  expect(!value.is_made, "a remote function has run twice");
  value.owner = node.id();
  value.owner_incarnation = node.incarnation;
  value.is_made = true;
  value.number = next_value_++;
  auto number = std::make_shared<int64_t>(value.number);
  return at::from_blob(
      number.get(), {1},
      [this, id, number](void*) {
        auto& dropped = values_.at(id);
        dropped.is_dropped = true;
        if (!dropped.has_failed) dropped_.push_back(id);
      },
      at::kLong);
}

Message World::encodeValue(SimulatedNode& node, const c10::IValue& value, const WorkerInfo& to) {
  auto reply = payloadOf(Kind::kReply, static_cast<uint64_t>(numberOf(value)));
  attach(node, reply, someHeld(node, 1), to.id);
  return reply;
}

void World::remote(SimulatedNode& node) {
  auto& call = newCall(node, anyId(), anyTimeout());
  auto message = payloadOf(Kind::kCppRemote, call.number);
  message.tensors = someTensors();
  try {
    attach(node, message, someHeld(node, 2), call.to);
  } catch (const Error&) {
  }
  if (simulation_.isTracing()) {
    say(node, "starts remote call " + std::to_string(call.number) + " to " + nameOf(call.to));
  }
  count("remote calls");
  const auto rref = node.rrefs().remote({nameOf(call.to), call.to}, std::move(message), call.timeout);
  const auto done = [this, &call, id = rref->id()](bool has_failed) {
    expect(++call.completions == 1, "remote call " + std::to_string(call.number) + " is completed twice");
    if (has_failed) values_[id].has_failed = true;
  };
  if (const auto user = asUser(rref)) {
    user->whenConfirmed([&call, done](const Status& failure) {
      if (call.completions == 0) done(failure.has_value());
    });
  } else {
    asOwner(rref)->whenReady([done](const Result<c10::IValue>& value) { done(!value.ok()); });
  }
  if (chance(80)) node.held.push_back(rref);
}

void World::makeOwn(SimulatedNode& node) {
  auto rref = node.rrefs().createOwner();
  rref->setValue(makeValue(rref->id(), node));
  node.held.push_back(rref);
}

void World::fetch(SimulatedNode& node) {
  if (node.held.empty()) return;
  const auto user = asUser(node.held[below(node.held.size())]);
  if (!user) return;
  if (simulation_.isTracing()) say(node, "fetches a value of " + user->owner().name);
  const auto troubles = troubles_;
  node.rrefs().fetch(
      user, Kind::kRRefFetch, anyTimeout(), [this, &node, id = user->id(), troubles](const Result<Message>& reply) {
        count(reply ? "values fetched" : "fetches failed");
        const auto& value = values_[id];
        if (reply) {
          const auto number = Reader(reply.value().payload).get<uint64_t>();
          expect(static_cast<int64_t>(number) == value.number, "a fetch gets another value");
          keep(node, reply.value(), 50);
        } else if (reply.error().code() == ErrorCode::kRRefDeleted) {
          expect(
              troubles_ > troubles || troubles > 0 || value.has_failed,
              "a value that a worker holds has been dropped: " + reply.error().text());
        }
      });
}

void World::release(SimulatedNode& node) {
  if (node.held.empty()) return;
  const auto chosen = node.held.begin() + static_cast<ptrdiff_t>(below(node.held.size()));
  const auto released = std::move(*chosen);
  node.held.erase(chosen);
}

// --- autograd ---

at::Tensor World::newParameter() {
  std::vector<double> values;
  for (int i = 0; i < 3; ++i) values.push_back(static_cast<double>(below(2000)) / 1000 - 1);
  return at::tensor(values).requires_grad_();
}

void World::beginSession(SimulatedNode& node) {
  auto session = std::make_shared<Session>();
  session->number = next_session_++;
  for (size_t steps = 1 + below(3); steps > 0; --steps) {
    std::vector<WorkerId> chain;
    for (size_t n = 1 + below(3); n > 0; --n) {
      const auto* visited = anyNode();
      if (!visited) return;
      chain.push_back(visited->id());
      session->visited.emplace_back(visited->id(), visited->incarnation);
    }
    session->steps.push_back(std::move(chain));
  }
  session->visited.emplace_back(node.id(), node.incarnation);
  session->unsent_before = unsent_;
  session->context = node.autograd().newContext();
  setCurrentContext(nullptr);
  session->input = newParameter();
  session->last = layer(session->input, node.parameter);
  if (simulation_.isTracing()) {
    std::string plan;
    for (const auto& chain : session->steps) {
      plan += plan.empty() ? " over " : "; ";
      for (const auto id : chain) plan += (id == chain[0] ? "" : ", ") + nameOf(id);
    }
    say(node, "begins session " + std::to_string(session->number) + plan);
  }
  count("sessions");
  ++open_sessions_;
  forward(node, session);
}

void World::forward(SimulatedNode& node, const std::shared_ptr<Session>& session) {
  if (chance(5)) return endSession(node, session);  // the program gives it up
  if (session->next_step == session->steps.size()) return backward(node, session);
  const auto& chain = session->steps[session->next_step];
  auto& call = newCall(node, chain[0], chance(80) ? kNoLimit : anyTimeout());
  call.chain = chain;
  const ContextScope scope(session->context);
  request(node, call, Kind::kCppCall, {}, {session->last}, [this, &node, session](const Result<Message>& reply) {
    node.agent().post([this, &node, session, reply] {
      if (!reply) return endSession(node, session);
      session->last = session->last + reply.value().tensors.at(0);
      ++session->next_step;
      forward(node, session);
    });
  });
}

void World::serveForward(
    SimulatedNode& node, const Call& call, const Invocation& invocation, const Responder& responder) {
  const auto output = layer(invocation.message.tensors.at(0), node.parameter);
  if (call.chain.size() == 1) return responder.reply({.kind = Kind::kReply, .tensors = {output}});
  auto& nested = newCall(node, call.chain[1], kNoLimit);
  nested.chain = {call.chain.begin() + 1, call.chain.end()};
  request(node, nested, Kind::kCppCall, {}, {output}, [&node, output, responder](const Result<Message>& reply) {
    node.agent().post([output, responder, reply] {
      if (!reply) return responder.fail(reply.error());
      responder.reply({.kind = Kind::kReply, .tensors = {output + reply.value().tensors.at(0)}});
    });
  });
}

void World::backward(SimulatedNode& node, const std::shared_ptr<Session>& session) {
  node.agent().post([this, &node, session] {
    say(node, "starts the backward pass of session " + std::to_string(session->number));
    Status failure;
    try {
      const auto loss = session->last.sum();
      node.autograd().backward(session->context->id(), {loss}, /*retain_graph=*/false, BackwardMode::kSmart);
    } catch (const Error& error) {
      failure = error;
    }
    count(failure ? "backward passes failed" : "backward passes");
    say(node, "session " + std::to_string(session->number) + (failure ? " fails: " + failure->text() : " succeeds"));
    if (!failure) checkGradients(node, *session);
    expect(
        !failure || isDisturbed(node, *session),
        "a backward pass fails without a cause: " + (failure ? failure->text() : ""));
    endSession(node, session);
  });
}

bool World::isDisturbed(SimulatedNode& node, const Session& session) const {
  if (node.is_closing || unsent_ > session.unsent_before) return true;
  // A worker that loses the owner tells the others that the owner's contexts have ended.
  const auto is_of_owner = [&node](const auto& pair) { return pair.first == node.id() || pair.second == node.id(); };
  if (std::ranges::any_of(severed_, is_of_owner)) return true;
  for (const auto& [one, incarnation] : session.visited) {
    if (has_ended_[static_cast<size_t>(one)]) return true;
    for (const auto& [other, also] : session.visited) {
      if (wereSevered(one, other)) return true;
    }
  }
  return false;
}

void World::checkGradients(SimulatedNode& node, const Session& session) {
  const bool is_undisturbed = !isDisturbed(node, session);
  std::map<WorkerId, at::Tensor> parameters;
  for (const auto& [id, incarnation] : session.visited) {
    if (!isLive(id, incarnation)) return;
    parameters[id] = this->node(id)->parameter.detach().clone().requires_grad_();
  }
  const std::function<at::Tensor(const std::vector<WorkerId>&, size_t, const at::Tensor&)> visit =
      [&](const std::vector<WorkerId>& chain, size_t from, const at::Tensor& input) -> at::Tensor {
    const auto output = layer(input, parameters.at(chain[from]));
    return from + 1 == chain.size() ? output : output + visit(chain, from + 1, output);
  };
  auto last = layer(session.input.detach(), parameters.at(node.id()));
  for (const auto& chain : session.steps) last = last + visit(chain, 0, last);
  std::vector<at::Tensor> leaves;
  for (const auto& [id, parameter] : parameters) leaves.push_back(parameter);
  const auto expected = torch::autograd::grad({last.sum()}, leaves);
  size_t index = 0;
  for (const auto& [id, parameter] : parameters) {
    const auto& gradient = expected[index++];
    const auto& here = *this->node(id);
    at::Tensor got;
    try {
      for (const auto& [leaf, value] : this->node(id)->autograd().gradients(session.context->id())) {
        if (leaf.is_same(here.parameter)) got = value;
      }
    } catch (const Error&) {  // the context has ended there, because a worker was lost
    }
    const auto text = "the gradient of session " + std::to_string(session.number) + " on " + nameOf(id);
    expect(got.defined() || !is_undisturbed, text + " is missing");
    if (got.defined() && !got.allclose(gradient, 1e-9, 1e-12)) {
      std::ostringstream both;
      both << text << " differs: " << got << " instead of " << gradient;
      simulation_.fail(both.str());
    }
    if (got.defined()) count("gradients compared");
  }
}

void World::endSession(SimulatedNode& node, const std::shared_ptr<Session>& session) {
  session->last = at::Tensor();
  --open_sessions_;
  say(node, "ends session " + std::to_string(session->number));
  try {
    node.autograd().release(session->context->id());
  } catch (const Error&) {  // the node has shut down
  }
}

// --- the schedule ---

void World::operate(SimulatedNode& node) {
  if (parts_.repeats && chance(40)) return repeatableCall(node);
  const auto what = below(100);
  if (what < 35 || (!parts_.rrefs && !parts_.autograd)) return call(node);
  if (parts_.autograd && what < 55) return beginSession(node);
  if (!parts_.rrefs) return call(node);
  if (what < 70) return remote(node);
  if (what < 75) return makeOwn(node);
  if (what < 87) return fetch(node);
  release(node);
}

void World::fault() {
  auto* chosen = anyNode();
  if (!chosen) return;
  switch (below(4)) {
    case 0: {
      auto* other = anyNode();
      if (!parts_.cuts || other == chosen) return;
      if (network_.cut(chosen->process, other->process) == 0) return;
      simulation_.trace("the network between " + chosen->process->name + " and " + other->process->name + " is CUT");
      count("cuts");
      return sever(chosen->id(), other->id());
    }
    case 1:
      if (!parts_.crashes || liveNodes().size() < 2) return;
      if (chance(70)) {
        simulation_.after(simulation_.between({}, seconds(3)), nullptr, [this, id = chosen->id()] { start(id); });
      }
      return end(chosen->id(), /*is_crash=*/true);
    case 2: {
      if (!parts_.joins) return;
      if (nodes_.size() < kMostWorkers && chance(60)) return start(static_cast<WorkerId>(nodes_.size()));
      if (liveNodes().size() < 2) return;
      say(*chosen, "begins to leave");
      if (chance(50)) {
        simulation_.after(
            simulation_.between(seconds(10), seconds(15)), nullptr, [this, id = chosen->id()] { start(id); });
      }
      return leave(nodes_[static_cast<size_t>(chosen->id())], simulation_.now() + kGraceOfLeaving);
    }
    default:
      if (!parts_.stops) return;
      say(*chosen, "stops for a while");
      count("stops");
      // Never earlier: the frames that wait would be overtaken.
      chosen->process->stopped_until =
          std::max(chosen->process->stopped_until, simulation_.now() + simulation_.between({}, kLongestStop));
  }
}

void World::step() {
  checkDropped();
  if (chance(6)) return fault();
  if (parts_.large_messages) countQueued();
  if (auto* chosen = anyNode()) operate(*chosen);
}

void World::countQueued() {
  for (auto* each : liveNodes()) {
    const auto metrics = each->agent().metrics();
    for (const auto* name : {"agent.num_held_calls", "agent.num_deferred_calls"}) {
      if (metrics.at(name) != "0") count(std::string("times that there are ") + name);
    }
  }
}

std::string World::run() {
  TimePoint when{};
  for (WorkerId id = 0; id < static_cast<WorkerId>(nodes_.size()); ++id) {
    if (id < 2 || chance(70)) simulation_.at(when, nullptr, [this, id] { start(id); });
  }
  when += kLongestAnnouncement;
  const auto length = kShortestProgram + below(kLongestProgram - kShortestProgram);
  for (size_t i = 0; i < length; ++i) {
    when += chance(3) ? simulation_.between({}, seconds(8)) : simulation_.between({}, milliseconds(3));
    simulation_.at(when, nullptr, [this] { step(); });
  }
  const auto healed = when + seconds(1);
  simulation_.at(healed, nullptr, [this] {
    simulation_.trace("the network is healed");
    is_healed_ = true;
    network_.setLatency({});
  });
  simulation_.at(healed + seconds(20), nullptr, [this] {
    simulation_.trace("the program releases its RRefs");
    for (auto* each : liveNodes()) const auto released = std::exchange(each->held, {});
  });
  simulation_.at(healed + minutes(2), nullptr, [this] { probe(); });
  simulation_.run(healed + minutes(20));
  if (simulation_.failure().empty()) {
    simulation_.at(simulation_.now(), nullptr, [this] { checkEnd(); });
    simulation_.run(simulation_.now());
  }
  const auto failure = simulation_.failure();
  simulation_.trace("the group ends");
  simulation_.forgetFailure();
  simulation_.at(simulation_.now(), nullptr, [this] {
    is_healed_ = true;
    for (WorkerId id = 0; id < static_cast<WorkerId>(nodes_.size()); ++id) {
      if (node(id)) end(id, /*is_crash=*/false);
    }
  });
  simulation_.run(simulation_.now() + minutes(20));
  return failure;
}

// --- the invariants ---

// Known gap: no worker watches the one from which it has a context of a third worker. It may not learn of the context's
// end if that one falls silent.

/// No value is dropped while a live worker holds it.
void World::checkDropped() {
  for (const auto& id : std::exchange(dropped_, {})) {
    const auto& value = values_.at(id);
    if (!isLive(value.owner, value.owner_incarnation)) continue;
    for (const auto* each : liveNodes()) {
      for (const auto& rref : each->held) {
        if (rref->id() != id) continue;
        const auto user = asUser(rref);
        const bool may_drop = user ? user->failure() || !user->confirmed() || wereSevered(each->id(), value.owner)
                                   : asOwner(rref)->creationFailure().has_value();
        expect(
            may_drop,
            "the value of RRef " + shortText(id) + ", owned by " + nameOf(value.owner) + ", is dropped while " +
                nameOf(each->id()) + " holds it");
      }
    }
  }
}

/// The owners of the arguments of a function have confirmed them.
void World::checkArguments(SimulatedNode& node, const RRefs& args) {
  for (const auto& arg : args) {
    const auto user = asUser(arg);
    if (!user) continue;
    expect(
        user->confirmed() || user->failure(),
        "a function runs on " + nameOf(node.id()) + " before its RRefs are confirmed");
  }
}

/// Every live worker reaches every other one, whatever has happened before.
void World::probe() {
  for (auto* from : liveNodes()) {
    for (const auto* to : liveNodes()) {
      auto& call = newCall(*from, to->id(), seconds(50));
      request(*from, call, Kind::kCppCall, {}, {}, [this, &call](const Result<Message>& reply) {
        const bool is_answered = reply || reply.error().code() == ErrorCode::kUserException;
        expect(
            is_answered || call.caller_ended,
            nameOf(call.from) + " does not reach " + nameOf(call.to) + " in the healed network" +
                (reply ? "" : ": " + reply.error().text()));
      });
    }
  }
}

void World::checkEnd() {
  checkDropped();
  const bool may_keep_contexts = counts_.contains("silent crashes");
  expect(simulation_.blockedEvents() == 0, "a thread is still blocked");
  expect(open_sessions_ == 0 || troubles_ > 0, "a session has not ended");
  for (auto* each : liveNodes()) {
    const auto& name = each->process->name;
    const auto numbers = each->agent().metrics();
    counts_["calls sent again"] += std::stoull(numbers.at("agent.retries"));
    counts_["calls that arrived again"] += std::stoull(numbers.at("agent.repeated_calls"));
    expect(!each->agent().hasOutstandingRequests(), name + " still has outstanding requests");
    expect(each->isIdle(), name + " is not idle");
    const auto metrics = each->agent().metrics();
    for (const auto* waiting : {"agent.num_held_calls", "agent.num_deferred_calls", "agent.queued_reply_bytes"}) {
      expect(metrics.at(waiting) == "0", name + " has " + waiting + " " + metrics.at(waiting));
    }
    const auto rrefs = each->rrefs().debugInfo();
    expect(rrefs.owner_rrefs == 0, name + " still owns " + std::to_string(rrefs.owner_rrefs) + " values");
    expect(rrefs.forks == 0, name + " still has forks in its owner table");
    expect(rrefs.pending_users == 0, name + " still has pending users");
    expect(rrefs.pending_children == 0, name + " still has children in flight");
    for (auto* other : liveNodes()) {
      // They have called each other in the healed network.
      const auto living = each->agent().membership().living({other->agent().self()});
      expect(living.size() == 1, name + " takes " + nameOf(other->id()) + " for gone");
    }
    const auto autograd = each->autograd().debugInfo();
    expect(
        may_keep_contexts || autograd.contexts == 0,
        name + " still has " + std::to_string(autograd.contexts) + " contexts");
    expect(autograd.backward_passes == 0, name + " still has backward passes");
  }
  for (const auto& [number, call] : calls_) {
    expect(
        call.completions == 1 || call.caller_ended,
        "call " + std::to_string(number) + " of " + nameOf(call.from) + " was completed " +
            std::to_string(call.completions) + " times");
  }
  for (const auto& [id, value] : values_) {
    if (!value.is_made || !isLive(value.owner, value.owner_incarnation)) continue;
    expect(
        value.is_dropped,
        "the value of RRef " + shortText(id) + ", owned by " + nameOf(value.owner) +
            ", is not dropped, and nobody holds it");
  }
  expect(may_keep_contexts || simulation_.pendingEvents() == 0, "something still happens twenty minutes after the end");
}

}  // namespace torchrpc::test
