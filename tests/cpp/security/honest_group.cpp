#include "security/honest_group.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "node/builtin_callables.h"
#include "rref/outgoing_forks.h"
#include "wire/codec.h"

namespace torchrpc::test {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Duration kTimeout = seconds(60);
constexpr Duration kLiveness = seconds(30);
constexpr Duration kLongestDelay = milliseconds(3);
/// Operations after which each worker has sent each kind of message to each other.
constexpr int kRehearsal = 150;
constexpr int64_t kMostElements = 1024;
/// Of the earlier starts of the liar, which the group has lost.
constexpr uint64_t kEarlierStart = 900;

std::string nameOf(WorkerId id) {
  if (id == kPrey) return "prey";
  if (id == kLiar) return "liar";
  if (id == kClient) return "client";
  return "worker" + std::to_string(id);
}

}  // namespace

std::string GroupKind::text() const {
  const auto* const what = proof == Proof::kIdentities ? "identities"
      : proof == Proof::kSecret                        ? "a secret only"
                                                       : "neither";
  return std::string(what) + (grows ? ", growing" : ", fixed");
}

SimulatedNetwork::Handshake GroupKind::handshake(const std::string& name, const char* role) const {
  if (proof == Proof::kIdentities) return {.identity = PeerIdentity{.name = name, .roles = {role}}};
  return {.name = proof == Proof::kSecret ? name : std::string()};
}

/// The program's functions on one node.
class HonestGroup::Runner final : public CallableRunner {
 public:
  Runner(HonestGroup& group, SimulatedNode& node) : group_(group), node_(node) {}

  void call(Invocation&& invocation, const Responder& responder) override {
    group_.serve(node_, std::move(invocation), responder);
  }
  void evaluate(Invocation&& invocation, ValueHandler done) override {
    Reader reader(invocation.message.payload);
    const auto function = reader.get<Function>();
    const auto number = reader.get<uint64_t>();
    reader.expectEnd();
    if (function == Function::kForward) return done(c10::IValue(at::ones({2}, at::kDouble).requires_grad_()));
    done(group_.makeValue(number));
  }

 private:
  HonestGroup& group_;
  SimulatedNode& node_;
};

HonestGroup::HonestGroup(Simulation& simulation, SimulatedNetwork& network, GroupKind kind)
    : simulation_(simulation), network_(network), kind_(kind) {}

HonestGroup::~HonestGroup() = default;

// --- members ---

Status HonestGroup::checkJoining(const WorkerRecord& record) const {
  // As Node::accept.
  const bool has_place = !kind_.grows && record.info.id >= 0 && record.info.id < kPlaces;
  if (has_place && record.world_size == kPlaces) return std::nullopt;
  return Error(ErrorCode::kRendezvous, "the group has no place for " + toString(record.info));
}

HonestGroup::NodePtr HonestGroup::makeNode(
    const WorkerInfo& self, uint64_t start, SimulatedNetwork::Handshake handshake, bool is_honest) {
  return std::make_unique<SimulatedNode>(
      simulation_, network_,
      SimulatedNode::Options{
          .self = self,
          .start = start,
          .liveness = kLiveness,
          .world_size = kind_.grows ? 0 : kPlaces,
          .handshake = std::move(handshake),
          .idempotency_window = seconds(1),
          .store = store_,
          .check_joining = [this](auto&, const WorkerRecord& record) { return checkJoining(record); },
          .encode_value =
              [](auto&, const c10::IValue& value, const WorkerInfo&) {
                Message reply{.kind = Kind::kReply};
                const auto& tensor = value.toTensor();
                Writer(reply.payload)
                    .put(tensor.scalar_type() == at::kLong ? tensor.const_data_ptr<int64_t>()[0] : int64_t{0});
                return reply;
              },
          .on_lost =
              [this, is_honest](auto& node, const WorkerInfo& worker) {
                if (!is_honest || !isHonest(node.id())) return;
                expect(!isHonest(worker.id), nameOf(node.id()) + " has lost " + toString(worker) + ", which lives");
              },
          .make_runner = [this](auto& node) { return std::make_shared<Runner>(*this, node); },
          .on_change =
              [this, is_honest](auto& node, const WorkerInfo& worker, MemberChange change) {
                if (!is_honest || !isHonest(node.id()) || change == MemberChange::kJoined) return;
                expect(
                    !isHonest(worker.id),
                    toString(worker) + " is reported as " + std::string(name(change)) + " to " + nameOf(node.id()));
              }});
}

std::unique_ptr<SimulatedNode> HonestGroup::makeDouble(
    const WorkerInfo& self, uint64_t start, SimulatedNetwork::Handshake handshake) {
  auto node = makeNode(self, start, std::move(handshake), /*is_honest=*/false);
  for (const auto& [id, record] : members_) node->agent().admit(record, /*is_news=*/false);
  return node;
}

void HonestGroup::start() {
  for (WorkerId id = 0; id <= kPrey; ++id) {
    nodes_.push_back(makeNode({nameOf(id), id}, 1, kind_.handshake(nameOf(id), PeerIdentity::kMemberRole), true));
    members_[id] = nodes_.back()->record();
  }
  for (const auto id : {kLiar, kClient}) {
    members_[id] = {
        .info = {nameOf(id), id},
        .address = "simulated:0",
        .world_size = kind_.grows ? 0 : kPlaces,
        .incarnation = kEarlierStart * kIncarnationStep,
        .metadata = {},
        .is_member = id != kClient || !kind_.provesNames()};
  }
  for (auto& each : nodes_) {
    for (const auto& [id, record] : members_) each->agent().admit(record, /*is_news=*/false);
  }
  for (WorkerId owner = 0; owner < kHonestWorkers; ++owner) {
    auto& node = this->node(owner);
    const auto holder = (owner + 1) % kHonestWorkers;
    const auto other = (owner + 2) % kHonestWorkers;
    const auto number = next_number_++;
    auto rref = this->node(holder).rrefs().remote(
        node.agent().self(), callOf(Function::kCompute, number, Kind::kCppRemote), kTimeout);
    treasures_.push_back({holder, rref, number});
    simulation_.after(milliseconds(10), nullptr, [this, rref, holder, other, number] {
      send(this->node(holder), other, Function::kTreasure, {rref});
      fetch(this->node(holder), rref, number);
    });
    auto object = node.rrefs().createOwner();
    objects_[owner] = next_number_++;
    object->setValue(makeValue(objects_[owner]));
    simulation_.after(milliseconds(5), node.process, [&node, owner, object] {
      node.namedObjects().add(nameOfObject(owner), object, kTimeout);
    });
  }
  simulation_.run(simulation_.now() + seconds(1));
}

void HonestGroup::rehearse() {
  for (WorkerId from = 0; from < kHonestWorkers; ++from) {
    for (WorkerId owner = 0; owner < kHonestWorkers; ++owner) {
      const auto rref = node(from).rrefs().remote(
          node(owner).agent().self(), callOf(Function::kCompute, next_number_++, Kind::kCppRemote), kTimeout);
      for (WorkerId to = 0; to < kHonestWorkers; ++to) send(node(from), to, Function::kKeep, {rref});
    }
  }
  for (int i = 0; i < kRehearsal; ++i) simulation_.after(i * milliseconds(1), nullptr, [this] { operate(); });
  simulation_.run(simulation_.now() + seconds(20));
  useAll();
}

void HonestGroup::restorePrey() {
  bool is_taken = false;
  for (WorkerId id = 0; id < kHonestWorkers; ++id) {
    is_taken = is_taken || node(id).agent().peerId(kPrey).incarnation != members_.at(kPrey).incarnation;
  }
  if (!is_taken) return;
  is_closing_ = true;
  end(node(kPrey));
  is_closing_ = false;
  nodes_[kPrey] =
      makeNode({nameOf(kPrey), kPrey}, ++prey_start_, kind_.handshake(nameOf(kPrey), PeerIdentity::kMemberRole), true);
  members_[kPrey] = node(kPrey).record();
  for (const auto& [id, record] : members_) node(kPrey).agent().admit(record, /*is_news=*/false);
  if (kind_.grows) {
    for (WorkerId id = 0; id < kHonestWorkers; ++id) node(id).admit(members_[kPrey]);
  } else {
    node(kPrey).announce(members_);
  }
  simulation_.run(simulation_.now() + seconds(10));
  for (WorkerId id = 0; id < kHonestWorkers; ++id) {
    const auto known = node(id).agent().directory().find(kPrey);
    expect(known && *known == members_[kPrey], nameOf(id) + " does not know the worker that has taken its place back");
  }
}

void HonestGroup::close() {
  is_closing_ = true;
  treasures_.clear();
  session_ = nullptr;
  for (const auto& each : nodes_) end(*each);
}

void HonestGroup::end(SimulatedNode& node) {
  bool is_closed = false;
  simulation_.after({}, nullptr, [&node, &is_closed] {
    node.close();  // may block
    is_closed = true;
  });
  auto failure = simulation_.failure();
  while (!is_closed) {  // a failure ends run()
    simulation_.forgetFailure();
    simulation_.run(simulation_.now() + seconds(1));
    if (failure.empty()) failure = simulation_.failure();
  }
  simulation_.forgetFailure();
  expect(failure.empty(), failure);
  simulation_.crash(*node.process);
}

// --- functions ---

Message HonestGroup::callOf(Function function, uint64_t number, Kind kind) {
  Message message{.kind = kind};
  Writer writer(message.payload);
  writer.put(function);
  writer.put(number);
  return message;
}

uint64_t HonestGroup::answerOf(Function function, uint64_t number, WorkerId callee) {
  if (function == Function::kNested) {
    return answerOf(Function::kLater, number, (callee + 1) % kHonestWorkers) + 1;
  }
  return number * 3 + static_cast<uint64_t>(callee);
}

c10::IValue HonestGroup::makeValue(uint64_t number) {
  auto value = std::make_shared<int64_t>(static_cast<int64_t>(number));
  ++*values_alive_;
  return at::from_blob(value.get(), {1}, [value, alive = values_alive_](void*) { --*alive; }, at::kLong);
}

void HonestGroup::serve(SimulatedNode& node, Invocation&& invocation, const Responder& responder) {
  Reader reader(invocation.message.payload);
  const auto function = reader.get<Function>();
  const auto number = reader.get<uint64_t>();
  reader.expectEnd();
  auto answer = [responder, text = answerOf(function, number, node.id())] {
    Message reply{.kind = Kind::kReply};
    Writer(reply.payload).put(text);
    responder.reply(std::move(reply));
  };
  switch (function) {
    case Function::kCompute: return answer();
    case Function::kLater: return node.agent().postAfter(simulation_.between({}, kLongestDelay), std::move(answer));
    case Function::kKeep:
      node.agent().postAfter(simulation_.between({}, kLongestDelay), [held = std::move(invocation.rrefs)] {});
      return answer();
    case Function::kTreasure:
      if (!isHonest(invocation.from.id)) break;
      for (auto& rref : invocation.rrefs) treasures_.push_back({node.id(), std::move(rref), number});
      return answer();
    case Function::kForward: {
      const auto& input = invocation.message.tensors.at(0);
      if (input.numel() > kMostElements) break;
      Message reply{.kind = Kind::kReply, .tensors = {input * (node.id() + 2)}};
      return responder.reply(std::move(reply));
    }
    case Function::kNested: {
      const auto next = (node.id() + 1) % kHonestWorkers;
      return node.messenger().request(
          next, callOf(Function::kLater, number), kTimeout, [responder](Result<Message> reply) {
            if (!reply) return responder.fail(reply.error());
            const auto nested = Reader(reply.value().payload).get<uint64_t>();
            Message outer{.kind = Kind::kReply};
            Writer(outer.payload).put(nested + 1);
            responder.reply(std::move(outer));
          });
    }
    default: break;
  }
  responder.fail(Error(ErrorCode::kUserException, "the function throws"));
}

// --- the honest program ---

void HonestGroup::expect(bool holds, const std::string& text) {
  if (!holds && !is_closing_) simulation_.fail(text);
}

void HonestGroup::call(
    SimulatedNode& from, WorkerId to, Function function, const std::shared_ptr<const Repetition>& once) {
  const auto number = next_number_++;
  auto message = callOf(function, number);
  message.repetition = once;
  ++calls_open_;
  from.messenger().request(
      to, std::move(message), kTimeout, [this, function, number, to, id = from.id()](const Result<Message>& reply) {
        --calls_open_;
        ++calls_answered_;
        const auto text = "a call of " + nameOf(id) + " to " + nameOf(to);
        if (function == Function::kFail) {
          return expect(
              !reply && reply.error().code() == ErrorCode::kUserException, text + " does not get its own error");
        }
        if (!reply) return expect(false, text + " fails: " + reply.error().text());
        const auto& payload = reply.value().payload;
        const bool is_right = payload.size() == sizeof(uint64_t) && reply.value().headers.empty() &&
            Reader(payload).get<uint64_t>() == answerOf(function, number, to);
        expect(is_right, text + " gets a wrong answer");
      });
}

void HonestGroup::send(SimulatedNode& from, WorkerId to, Function function, const std::vector<RRefPtr>& rrefs) {
  auto message = callOf(function, next_number_++);
  OutgoingForks forks(from.rrefs(), to);
  for (const auto& rref : rrefs) forks.add(rref);
  forks.commit(message);
  ++calls_open_;
  from.messenger().request(to, std::move(message), kTimeout, [this, &from, to](const Result<Message>& reply) {
    --calls_open_;
    if (!reply) {
      expect(
          !isHonest(from.id()) || from.id() == kPrey,
          "a call with RRefs of " + nameOf(from.id()) + " to " + nameOf(to) + " fails: " + reply.error().text());
    }
  });
}

void HonestGroup::fetch(SimulatedNode& from, const RRefPtr& rref, uint64_t number) {
  ++calls_open_;
  from.rrefs().fetch(
      std::static_pointer_cast<UserRRef>(rref), Kind::kRRefFetch, kTimeout,
      [this, &from, rref, number](const Result<Message>& reply) {
        --calls_open_;
        const bool is_right = reply && Reader(reply.value().payload).get<uint64_t>() == number;
        expect(
            is_right,
            nameOf(from.id()) + " does not get the value of its RRef" + (reply ? "" : ": " + reply.error().text()));
      });
}

void HonestGroup::remote(SimulatedNode& from, WorkerId to) {
  const auto number = next_number_++;
  auto rref =
      from.rrefs().remote(node(to).agent().self(), callOf(Function::kCompute, number, Kind::kCppRemote), kTimeout);
  if (to == from.id()) return;
  if (simulation_.chance(50)) send(from, anyHonest(), Function::kKeep, {rref});
  fetch(from, rref, number);
}

void HonestGroup::lookUp(SimulatedNode& from, WorkerId owner) {
  simulation_.after({}, from.process, [this, &from, owner] {
    try {
      const auto rref = from.namedObjects().lookUp(nameOfObject(owner), kTimeout);
      expect(rref->owner().id == owner, "a name leads to an object of " + rref->owner().name);
      if (owner != from.id()) fetch(from, rref, objects_.at(owner));
    } catch (const Error& error) {
      expect(false, "an object is not found by its name: " + error.text());
    }
  });
}

void HonestGroup::operate() {
  auto& from = node(anyHonest());
  const auto to = anyHonest();
  const auto what = simulation_.below(100);
  if (what < 20) return call(from, to, Function::kCompute);
  if (what < 50) return call(from, to, Function::kLater);
  if (what < 60) return call(from, to, Function::kNested);
  if (what < 65) return call(from, to, Function::kFail);
  if (what < 80) return remote(from, to);
  if (what < 88) {
    const auto& treasure = treasures_[simulation_.below(treasures_.size())];
    const auto owner = treasure.rref->owner().id;
    if (treasure.holder != owner && treasure.number < next_number_) {
      send(node(treasure.holder), to, Function::kKeep, {treasure.rref});
    }
    return;
  }
  if (what < 96) {
    return call(
        from, to, Function::kLater,
        std::make_shared<Repetition>(
            Repetition{.policy = {.retries = 2}, .key = "key " + std::to_string(next_number_)}));
  }
  if (what < 98) return lookUp(from, to);
  if (kind_.provesNames()) call(from, kPrey, Function::kLater);
}

void HonestGroup::forward(SimulatedNode& node, const std::shared_ptr<Session>& session, WorkerId to) {
  auto message = callOf(Function::kForward, next_number_++);
  message.tensors = {session->input};
  const ContextScope scope(session->context);
  ++session->open_calls;
  ++calls_open_;
  node.messenger().request(to, std::move(message), kTimeout, [this, &node, session](const Result<Message>& reply) {
    --calls_open_;
    if (!reply) return expect(false, "a step of a forward pass fails: " + reply.error().text());
    node.agent().post([session, output = reply.value().tensors.at(0)] {
      session->last = session->last.defined() ? session->last + output : output;
      --session->open_calls;
    });
  });
}

void HonestGroup::beginSession() {
  auto& node = this->node(anyHonest());
  session_ = std::make_shared<Session>();
  session_->context = node.autograd().newContext();
  setCurrentContext(nullptr);
  session_->input = at::ones({2}, at::kDouble).requires_grad_();
  for (WorkerId to = 0; to < kHonestWorkers; ++to) {
    if (to != node.id()) forward(node, session_, to);
  }
}

void HonestGroup::endSession() {
  auto& node = this->node(session_->context->owner());
  simulation_.after({}, node.process, [this, &node, session = std::exchange(session_, nullptr)] {
    expect(session->open_calls == 0, "a forward pass has not ended");
    if (session->open_calls == 0) backward(node, session);
  });
}

void HonestGroup::backward(SimulatedNode& node, const std::shared_ptr<Session>& session) {
  try {
    node.autograd().backward(
        session->context->id(), {session->last.sum()}, /*retain_graph=*/false,
        simulation_.chance(50) ? BackwardMode::kSmart : BackwardMode::kFast);
    double expected = 0;
    for (WorkerId to = 0; to < kHonestWorkers; ++to) expected += to == node.id() ? 0 : to + 2;
    bool is_right = false;
    for (const auto& [leaf, gradient] : node.autograd().gradients(session->context->id())) {
      is_right = is_right || (leaf.is_same(session->input) && gradient.const_data_ptr<double>()[0] == expected);
    }
    expect(is_right, "a backward pass gives a wrong gradient");
    session->last = at::Tensor();
    node.autograd().release(session->context->id());
  } catch (const Error& error) {
    expect(false, "a backward pass fails: " + error.text());
  }
}

void HonestGroup::useAll() {
  for (WorkerId from = 0; from < kHonestWorkers; ++from) {
    for (WorkerId to = 0; to < kHonestWorkers; ++to) {
      auto& node = this->node(from);
      call(node, to, Function::kCompute);
      if (to == (from + 1) % kHonestWorkers) {
        call(
            node, to, Function::kCompute,
            std::make_shared<Repetition>(Repetition{.policy = {}, .key = "use " + std::to_string(next_number_)}));
      }
    }
  }
  lookUp(node(anyHonest()), anyHonest());
  for (const auto& each : treasures_) {
    if (each.rref->owner().id != each.holder && each.rref->id().created_on == each.holder) {
      fetch(node(each.holder), each.rref, each.number);
    }
  }
  for (WorkerId from = 0; from < kHonestWorkers && kind_.provesNames(); ++from) {
    call(node(from), kPrey, Function::kCompute);
  }
  simulation_.run(simulation_.now() + milliseconds(500));
}

// --- the invariants ---

HonestGroup::State HonestGroup::state() {
  State state;
  state["values"] = *values_alive_;
  for (WorkerId id = 0; id < kHonestWorkers; ++id) {
    auto& each = node(id);
    const auto put = [&](const char* what, uint64_t count) { state[nameOf(id) + ": " + what] = count; };
    const auto counts = each.agent().counts();
    const auto rrefs = each.rrefs().debugInfo();
    const auto autograd = each.autograd().debugInfo();
    uint64_t links = 0;
    uint64_t unanswered = 0;
    for (const auto& row : each.agent().connectionRows()) {
      if (row.peer.id == kPrey && !kind_.provesNames()) continue;  // it may be a start of it that is not there any more
      ++links;
      unanswered += row.has_unanswered ? 1 : 0;
    }
    put("links", links);
    put("links with requests that are not answered", unanswered);
    put("calls", counts.pending_calls);
    put("tasks", counts.queued_tasks);
    put("bytes of replies that wait", counts.queued.reply_bytes);
    put("calls that wait for the peer to read", counts.queued.deferred_calls);
    put("calls that are held back", counts.queued.held_calls);
    put("keyed calls", counts.keyed.calls);
    put("bytes of keyed calls", counts.keyed.reply_bytes);
    put("values of RRefs", rrefs.owner_rrefs);
    put("forks", rrefs.forks);
    put("pending users", rrefs.pending_users);
    put("pending children", rrefs.pending_children);
    put("runs of numbers", rrefs.number_runs);
    put("contexts", autograd.contexts);
    put("backward passes", autograd.backward_passes);
    put("workers in the directory", each.agent().directory().all().size());
  }
  return state;
}

std::string HonestGroup::expectedValues() {
  constexpr size_t kMostRows = 1000;
  std::string out;
  for (WorkerId id = 0; id < kHonestWorkers; ++id) {
    for (const auto& row : node(id).rrefs().ownedRows(kMostRows)) {
      if (row.holders.empty()) out += ", " + nameOf(id) + " expects " + toString(row.rref->id());
    }
  }
  return out;
}

void HonestGroup::check(const std::map<WorkerId, std::set<uint64_t>>& claimed) {
  expect(calls_open_ == 0, std::to_string(calls_open_) + " honest calls have not ended");
  std::vector<WorkerInfo> honest;
  for (WorkerId id = 0; isHonest(id); ++id) honest.push_back(members_.at(id).info);
  for (WorkerId id = 0; isHonest(id); ++id) {
    auto& agent = node(id).agent();
    expect(agent.membership().living(honest).size() == honest.size(), nameOf(id) + " takes an honest worker for lost");
    for (const auto& record : agent.directory().records()) {
      const auto text = "the directory of " + nameOf(id) + " has " + toString(record.info);
      const auto member = members_.find(record.info.id);
      if (member == members_.end()) return expect(false, text + ", which nobody has admitted");
      const auto& known = member->second;
      expect(record.info == known.info, text + " in the place of " + toString(known.info));
      expect(record.is_member == known.is_member, text + " in another role");
      if (isHonest(record.info.id)) expect(record.address == known.address, text + " with another address");
      const auto starts = claimed.find(record.info.id);
      const bool is_claimed = starts != claimed.end() && starts->second.contains(record.incarnation);
      expect(
          record.incarnation == known.incarnation || is_claimed,
          text + " with an incarnation that it has not, " + std::to_string(record.incarnation));
      if (record.info.id != kPrey && record.info.id != kLiar && record.info.id != kClient) {
        expect(agent.directory().info(known.info.name) == known.info, "a name has changed hands on " + nameOf(id));
      }
    }
  }
}

}  // namespace torchrpc::test
