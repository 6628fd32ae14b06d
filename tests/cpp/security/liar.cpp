#include "security/liar.h"

#include <ATen/ops/ones.h>

#include <algorithm>
#include <cstring>

#include "rref/outgoing_forks.h"
#include "wire/codec.h"
#include "wire/value_codec.h"

namespace torchrpc::test {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Duration kTimeoutOfLiar = seconds(20);
constexpr WorkerId kStrangerId = 77;
constexpr size_t kMostFrames = 600;
/// For the frames, and for the news that the connection has ended.
constexpr Duration kLongestReaction = milliseconds(6);
/// The call ids of the lies begin here, and each lie has that many.
constexpr CallId kFirstCall = CallId{1} << 40;
constexpr CallId kCallsOfLie = 8;

}  // namespace

/// A connection to a worker, or from one.
class Liar::Wire final : public ConnectionHandler {
 public:
  Wire(Liar& liar, WorkerId to) : liar_(&liar), to_(to) {}

  void attach(std::shared_ptr<Connection> connection) { connection_ = std::move(connection); }
  WorkerId to() const { return to_; }
  bool isOpen() const { return connection_ != nullptr; }
  void send(std::string head) {
    if (connection_) connection_->send({.head = std::move(head)}, [](const Status&) {});
  }
  /// If this connection ends soon, and the lie has not been answered, the connection counts as closed for it.
  void expectFate(uint64_t told) { told_.push_back(told); }
  void close() {
    liar_ = nullptr;
    if (const auto connection = std::exchange(connection_, nullptr)) connection->close();
  }

  void onFrame(Frame&& frame) override {
    const auto info = peekFrame(frame.head);
    if (!liar_ || !info) return;
    const auto role = roleOf(info->kind);
    if (role == Role::kReply) {
      liar_->onReply(info->call, info->kind);
    } else if (role == Role::kRequest) {
      liar_->onRequest(*this, info->kind, info->call);
    }
  }
  void onClosed(const Error&) override {
    connection_ = nullptr;
    if (!liar_) return;
    for (const auto told : told_) {
      auto& each = liar_->told_.at(told);
      const bool is_recent = liar_->simulation_.now() - each.when <= kLongestReaction;
      if (each.fate == Told::Fate::kNone && is_recent) each.fate = Told::Fate::kClosed;
    }
  }

 private:
  Liar* liar_;  ///< null when the liar has closed it
  const WorkerId to_;
  std::shared_ptr<Connection> connection_;
  std::vector<uint64_t> told_;
};

Liar::Liar(Simulation& simulation, SimulatedNetwork& network, HonestGroup& group, OutcomeTable& table)
    : simulation_(simulation),
      network_(network),
      group_(group),
      table_(table),
      process_(std::make_shared<Simulation::Process>(Simulation::Process{.name = "the liar"})) {
  network_.observe([this](const auto& from, const auto& to, const Frame& frame) { onFrameSent(from, to, frame); });
  listener_ = network_.makeTransport(process_);
  known_.address = listener_->listen([this](std::shared_ptr<Connection> connection) -> std::shared_ptr<Wire> {
    if (!is_here_) return nullptr;
    auto wire = std::make_shared<Wire>(*this, kNoWorker);
    wire->attach(std::move(connection));
    wires_.push_back(wire);
    return wire;
  });
}

Liar::~Liar() { network_.observe({}); }

// --- what it learns ---

namespace {
/// The id of the worker whose process that is, by the name that SimulatedNode gives it.
WorkerId idOf(const Simulation::Process& process, const std::map<WorkerId, WorkerRecord>& members) {
  const std::string_view name(process.name);
  for (const auto& [id, record] : members) {
    if (name.size() > record.info.name.size() && name.starts_with(record.info.name) &&
        name[record.info.name.size()] == '.') {
      return id;
    }
  }
  return kNoWorker;
}
}  // namespace

void Liar::onFrameSent(const Simulation::Process& from, const Simulation::Process& to, const Frame& frame) {
  if ((!is_recording_ && !is_overhearing_) || !frame.segments.empty()) return;
  const auto info = peekFrame(frame.head);
  if (!info || roleOf(info->kind) != Role::kRequest) return;
  const auto receiver = idOf(to, group_.members());
  if (receiver < 0 || receiver >= kHonestWorkers) return;
  const auto sender = idOf(from, group_.members());
  const RecordedFrame recorded{.from = sender, .to = receiver, .kind = info->kind, .head = frame.head};
  const bool is_own = double_ && from.name == double_->process->name;
  if (is_own && is_recording_ && known_.own.size() < kMostFrames) known_.own.push_back(recorded);
  const bool is_of_honest = sender >= 0 && sender < kHonestWorkers;
  if (is_of_honest && is_overhearing_ && info->kind == Kind::kCppCall &&
      decodeFrame({.head = frame.head}).header(HeaderKind::kAutogradContext)) {
    in_contexts_.push_back(recorded);
  }
  if (is_of_honest && is_overhearing_ && overheard_.size() < kMostFrames) overheard_.push_back(recorded);
}

void Liar::arrive(WorkerId place, bool is_member, uint64_t start) {
  const bool is_known = group_.members().contains(place);
  const WorkerInfo self = is_known ? group_.members().at(place).info : WorkerInfo{"stranger", kStrangerId};
  auto handshake = group_.kind().handshake(self.name, is_member ? PeerIdentity::kMemberRole : "client");
  auto address = std::move(known_.address);
  auto of_members = std::move(known_.of_members);
  known_ = {
      .group = group_.kind(),
      .self = self,
      .incarnation = start * kIncarnationStep,
      .handshake = handshake,
      .is_member = is_member || !group_.kind().provesNames(),
      .is_known = is_known,
      .address = std::move(address),
      .members = &group_.members(),
      .of_members = std::move(of_members),
      .awaited = [this](WorkerId id) {
        std::vector<CallId> calls;
        for (const auto& row : group_.node(id).agent().callsMade(8)) calls.push_back(row.id);
        return calls;
      }};
  told_.clear();
  is_here_ = true;
  if (is_known) claimed_[place].insert(known_.incarnation);
  double_ = group_.makeDouble(self, start, handshake);
  is_recording_ = true;
  warmUp();
  is_recording_ = false;
  known_.overheard = overheard_;
  known_.in_contexts = std::exchange(in_contexts_, {});
  for (const auto& each : known_.own) {
    if (is_member && isForMembers(each.kind) && known_.of_members.size() < kMostFrames) {
      known_.of_members.push_back(each);
    }
  }
}

void Liar::warmUp() {
  bool is_over = false;
  const auto chosen = static_cast<WorkerId>(simulation_.below(kHonestWorkers));
  for (WorkerId to = 0; to < kHonestWorkers; ++to) {
    // The worker sends its requests to the liar over the first connection, so that the liar gets them.
    if (to != chosen && simulation_.chance(50)) ownWire(to);
    simulation_.after(milliseconds(10), double_->process, [this, to] { useGroup(to); });
    if (to != chosen) continue;
    simulation_.after(milliseconds(10), double_->process, [this, to, &is_over] {
      try {
        useAll(to);
      } catch (const Error& error) {
        group_.expect(false, "what the liar does truly fails: " + error.text());
      }
      is_over = true;
    });
  }
  simulation_.run(simulation_.now() + seconds(1));
  group_.expect(is_over, "what the liar does truly has not ended");
}

void Liar::useGroup(WorkerId to) {
  auto& node = *double_;
  auto& group = group_;
  const auto ask = [&](Message message) {
    node.messenger().request(to, std::move(message), kTimeoutOfLiar, [](const Result<Message>&) {});
  };
  ask(HonestGroup::callOf(Function::kCompute, 7));
  ask(HonestGroup::callOf(Function::kLater, 8));
  auto with_key = HonestGroup::callOf(Function::kCompute, 9);
  with_key.repetition = std::make_shared<Repetition>(Repetition{.policy = {}, .key = "of the liar"});
  ask(std::move(with_key));
  Message add{.kind = Kind::kBuiltinCall};
  Writer out(add.payload);
  out.putString("aten::add");
  out.putString("Scalar");
  out.put(uint32_t{3});
  std::vector<at::Tensor> none;
  for (int i = 0; i < 3; ++i) encodeValue(c10::IValue(int64_t{i}), out, none);
  ask(std::move(add));
  const auto owner = group.node(to).agent().self();
  for (int i = 0; i < 2; ++i) {
    auto rref =
        node.rrefs().remote(owner, HonestGroup::callOf(Function::kCompute, 10, Kind::kCppRemote), kTimeoutOfLiar);
    held_.push_back(rref);
    group.send(node, (to + 1) % kHonestWorkers, Function::kKeep, {rref});
    node.rrefs().fetch(
        std::static_pointer_cast<UserRRef>(rref), Kind::kRRefFetch, kTimeoutOfLiar, [](const Result<Message>&) {});
  }
  auto mine = node.rrefs().createOwner();
  mine->setValue(c10::IValue(at::ones({1}, at::kLong)));
  group.send(node, to, Function::kKeep, {mine});
  {
    // Deleted at once.
    const auto dropped =
        node.rrefs().remote(owner, HonestGroup::callOf(Function::kCompute, 11, Kind::kCppRemote), kTimeoutOfLiar);
  }
  if (!group.kind().grows && known_.is_known && to == 0) node.announce(group.members());
}

void Liar::useAll(WorkerId to) {
  auto& node = *double_;
  held_.push_back(node.namedObjects().lookUp(HonestGroup::nameOfObject(to), kTimeoutOfLiar));
  if (!known_.is_member) return;
  // A name, and an optimizer.
  const auto parameter = node.rrefs().remote(
      group_.node(to).agent().self(), HonestGroup::callOf(Function::kForward, 12, Kind::kCppRemote), kTimeoutOfLiar);
  // add() would wait for it by the system's clock.
  node.agent().poll([user = std::static_pointer_cast<UserRRef>(parameter)] { return user->confirmed(); });
  const auto label = "of the liar " + std::to_string(to);
  node.namedObjects().add(label, parameter, kTimeoutOfLiar);
  node.namedObjects().remove(label, kTimeoutOfLiar);
  std::optional<RRefPtr> optimizer;
  const OptimCreate create{.kind = "SGD", .groups = {{.params = 1, .options = {}}}};
  node.optim().create(
      group_.node(to).agent().self(), create, {parameter}, kTimeoutOfLiar,
      [&optimizer](Result<RRefPtr> created) { optimizer = created ? created.value() : nullptr; });
  node.agent().poll([&optimizer] { return optimizer.has_value(); });
  // A forward and a backward pass.
  const auto context = node.autograd().newContext();
  setCurrentContext(nullptr);
  auto step = HonestGroup::callOf(Function::kForward, 13);
  const auto input = at::ones({2}, at::kDouble).requires_grad_();
  step.tensors = {input};
  at::Tensor output;
  {
    const ContextScope scope(context);
    node.messenger().request(to, std::move(step), kTimeoutOfLiar, [&output](const Result<Message>& reply) {
      if (reply) output = reply.value().tensors.at(0);
    });
  }
  node.agent().poll([&output] { return output.defined(); });
  for (const auto mode : {BackwardMode::kSmart, BackwardMode::kFast}) {
    node.autograd().backward(context->id(), {output.sum()}, /*retain_graph=*/true, mode);
  }
  group_.expect(*optimizer != nullptr, "the liar gets no optimizer");
  if (*optimizer) {
    held_.push_back(*optimizer);
    const auto text = OptimService::nameOf(**optimizer);
    for (auto message :
         {encode(OptimStep{.optimizer = text, .context = context->id(), .revision = 1, .options = {}}),
          encodeOptimState(text), encodeOptimLoad(text, {})}) {
      node.optim().request(*optimizer, std::move(message), kTimeoutOfLiar, [](const Result<Message>&) {});
    }
  }
  // The context ends with the liar.
}

// --- how it lies ---

Transport& Liar::transportOf(const SimulatedNetwork::Handshake& handshake) {
  auto text = handshake.name;
  if (handshake.identity) {
    text = handshake.identity->name;
    for (const auto& role : handshake.identity->roles) text += "/" + role;
  }
  auto& transport = transports_[text];
  if (!transport) transport = network_.makeTransport(process_, handshake);
  return *transport;
}

std::shared_ptr<Liar::Wire> Liar::open(WorkerId to, const SimulatedNetwork::Handshake& handshake) {
  auto wire = std::make_shared<Wire>(*this, to);
  const auto& node = group_.node(to);
  wire->attach(transportOf(handshake).connect(node.address, group_.members().at(to).info.name, wire));
  wires_.push_back(wire);
  return wire;
}

Liar::Wire& Liar::ownWire(WorkerId to) {
  auto& wire = own_wires_[to];
  if (!wire || !wire->isOpen()) {
    wire = open(to, known_.handshake);
    wire->send(helloFrame(known_.self.id, known_.self.name, known_.incarnation, kProtocolVersion));
  }
  return *wire;
}

void Liar::tell(uint64_t seed, uint64_t number) {
  Dice dice(seed ^ (number * 0xD1B54A32D192ED03ull));
  std::optional<Lie> lie;
  while (!lie) lie = makeLie(known_, dice);
  const auto told = told_.size();
  told_.push_back({.kind = lie->kind, .when = simulation_.now(), .must_be_refused = lie->must_be_refused});
  if (lie->claimed_id != kNoWorker) claimed_[lie->claimed_id].insert(lie->claimed_incarnation);
  if (simulation_.isTracing()) {
    simulation_.trace(
        "lie " + std::to_string(number) + " to worker" + std::to_string(lie->to) + ": " + std::string(name(lie->kind)));
  }
  auto& wire = lie->is_over_new_connection ? *open(lie->to, lie->handshake) : ownWire(lie->to);
  wire.expectFate(told);
  const bool must_renumber = !lie->has_own_call_ids;
  for (size_t i = 0; i < lie->frames.size(); ++i) {
    auto& head = lie->frames[i];
    const auto info = peekFrame(head);
    auto call = info ? info->call : 0;
    if (must_renumber && info && roleOf(info->kind) != Role::kOneWay) {
      call = kFirstCall + told * kCallsOfLie + std::min<CallId>(i, kCallsOfLie - 1);
      std::memcpy(head.data() + kCallIdAt, &call, sizeof(call));
    }
    if (info && info->kind == Kind::kNameHold) holds_[call] = {lie->to, head, /*may_be_held=*/!must_renumber};
    wire.send(std::move(head));
  }
}

void Liar::onReply(CallId call, Kind kind) {
  const auto told = (call - kFirstCall) / kCallsOfLie;
  if (call < kFirstCall || told >= told_.size()) return;
  if (const auto hold = holds_.find(call); hold != holds_.end() && kind == Kind::kReply)
    hold->second.may_be_held = true;
  auto& each = told_[told];
  if (kind == Kind::kReply && each.must_be_refused) {
    group_.expect(
        false, "an honest worker answers a lie about the " + std::string(name(each.kind)) + " as if it were true");
  }
  if (each.fate != Told::Fate::kAnswered) {
    each.fate = kind == Kind::kReply ? Told::Fate::kAnswered : Told::Fate::kRefused;
  }
}

void Liar::onRequest(Wire& wire, Kind kind, CallId call) {
  group_.expect(!isCall(kind), "a call of an honest worker goes to the liar");
  ++table_[LieKind::kAnswer].sent;
  ++table_[LieKind::kAnswer].ignored;
  Message message{.kind = Kind::kReply, .call = call};
  switch (answers_.below(4)) {
    case 0: break;
    case 1: message = encodeError(Error(ErrorCode::kTimeout, "the liar does not know")); break;
    case 2: message.payload = answers_.bytes(60); break;
    default: message.kind = Kind::kError; message.payload = answers_.bytes(60);
  }
  message.call = call;
  wire.send(frameOf(message));
}

void Liar::settle() {
  for (const auto& each : told_) {
    auto& outcomes = table_[each.kind];
    ++outcomes.sent;
    switch (each.fate) {
      case Told::Fate::kNone: ++outcomes.ignored; break;
      case Told::Fate::kRefused: ++outcomes.refused; break;
      case Told::Fate::kAnswered: ++outcomes.answered; break;
      case Told::Fate::kClosed: ++outcomes.closed; break;
    }
  }
}

void Liar::leave() {
  settle();
  // A member may register names, and they outlive it.
  for (const auto& [call, hold] : holds_) {
    if (!hold.may_be_held || !known_.is_member) continue;
    try {
      ownWire(hold.to).send(frameOf({.kind = Kind::kNameDrop, .payload = decodeFrame({.head = hold.head}).payload}));
    } catch (const Error&) {  // the bytes mean nothing
    }
  }
  holds_.clear();
  simulation_.run(simulation_.now() + milliseconds(20));
  is_here_ = false;
  for (const auto& each : std::exchange(wires_, {})) each->close();
  own_wires_.clear();
  held_.clear();
  if (!double_) return;
  group_.end(*double_);
  double_.reset();
}

}  // namespace torchrpc::test
