#include "rref/sim_network.h"

namespace torchrpc::testing {

class SimNetwork::Node : public Messenger {
 public:
  Node(SimNetwork& network, WorkerId id) : network_(network), self_(info(id)) {}

  const WorkerInfo& self() const override { return self_; }
  WorkerInfo worker(WorkerId id) const override { return info(id); }
  PeerId peerId(WorkerId id) const override {
    const auto known = network_.incarnations.find(id);
    return {id, known == network_.incarnations.end() ? 0 : known->second};
  }
  void request(WorkerId to, Message&& message, Duration, ReplyHandler&& handler) override {
    network_.send(self_.id, to, std::move(message), false, std::move(handler));
  }
  void requestReliably(WorkerId to, Message&& message, ReplyHandler&& handler) override {
    network_.send(self_.id, to, std::move(message), true, std::move(handler));
  }
  void on(Kind kind, Where where, RequestHandler handler) override { handlers[kind] = {where, std::move(handler)}; }
  void postToStrand(Task&& task) override { post(std::move(task)); }
  void post(Task&& task) override {
    if (network_.alive(self_.id)) network_.tasks_.push_back({self_.id, std::move(task)});
  }
  void postAfter(Duration, std::function<void()> task) override { post(std::move(task)); }

  std::map<Kind, std::pair<Where, RequestHandler>> handlers;

 private:
  SimNetwork& network_;
  const WorkerInfo self_;
};

SimNetwork::SimNetwork(int nodes) {
  for (int id = 0; id < nodes; ++id) nodes_.push_back(std::make_unique<Node>(*this, id));
}

SimNetwork::~SimNetwork() {
  for (const auto& node : nodes_) dead_.insert(node->self().id);  // destructors must not send anything now
}

Messenger& SimNetwork::node(WorkerId id) { return *nodes_.at(id); }

void SimNetwork::send(WorkerId from, WorkerId to, Message message, bool reliable, Messenger::ReplyHandler handler) {
  if (!alive(from)) return;
  if (noticed(from, to)) {
    on_undelivered(from, message);
    return handler(Error(ErrorCode::kWorkerLost, info(to).name + " is lost", info(to).name));
  }
  const auto call = next_call_++;
  calls_.emplace(call, Call{from, to, std::move(message), std::move(handler), reliable});
  pushRequest(call);
}

void SimNetwork::pushRequest(uint64_t call) {
  const auto& c = calls_.at(call);
  packets_.push_back({c.from, c.to, call, false, c.message.kind, c.message, std::make_shared<bool>(false)});
}

void SimNetwork::finish(uint64_t call, Result<Message> result) {
  auto node = calls_.extract(call);
  if (node) node.mapped().handler(std::move(result));
}

void SimNetwork::handOver(const Packet& packet) {
  if (!alive(packet.to)) {
    if (packet.content.ok() && alive(packet.from)) on_undelivered(packet.from, packet.content.value());
    return;
  }
  *packet.delivered = true;
  auto content = packet.content;
  if (content.ok()) content.value().from = packet.from;
  if (packet.reply) {
    if (calls_.count(packet.call)) {
      finish(packet.call, std::move(content));
    } else if (content.ok() && on_late_reply) {
      on_late_reply(packet.to, content.value());
    }
    return;
  }
  const Responder responder(
      [this, to = packet.to, from = packet.from, call = packet.call, kind = packet.kind](Result<Message> r) {
        if (alive(to)) packets_.push_back({to, from, call, true, kind, std::move(r), std::make_shared<bool>(false)});
      });
  const auto& [where, handler] = nodes_.at(packet.to)->handlers.at(packet.kind);
  Request request{{info(packet.from)}, std::move(content).value()};
  // As an agent does.
  auto serve = [&handler = handler, request = std::move(request), responder]() mutable {
    try {
      handler(std::move(request), responder);
    } catch (const Error& error) {
      responder.fail(error);
    }
  };
  if (where == Messenger::Where::kLoop) return serve();
  nodes_.at(packet.to)->post(std::move(serve));
}

void SimNetwork::deliver(size_t index) {
  const auto packet = std::move(packets_.at(index));
  packets_.erase(packets_.begin() + static_cast<ptrdiff_t>(index));
  handOver(packet);
}

void SimNetwork::repeat(size_t index) {
  const auto packet = packets_.at(index);
  handOver(packet);
}

void SimNetwork::drop(size_t index) {
  const auto packet = std::move(packets_.at(index));
  packets_.erase(packets_.begin() + static_cast<ptrdiff_t>(index));
  auto call = calls_.find(packet.call);
  const bool open = call != calls_.end();
  if (open && call->second.reliable) return pushRequest(packet.call);
  if (*packet.delivered) return;
  if (packet.content.ok() && alive(packet.from)) on_undelivered(packet.from, packet.content.value());
  if (open && alive(packet.to)) finish(packet.call, Error(ErrorCode::kTimeout, "the message or its reply was lost"));
}

void SimNetwork::runTask(size_t index) {
  const auto task = std::move(tasks_.at(index));
  tasks_.erase(tasks_.begin() + static_cast<ptrdiff_t>(index));
  task.run();
}

std::vector<uint64_t> SimNetwork::openCalls() const {
  std::vector<uint64_t> open;
  for (const auto& [id, call] : calls_) {
    if (!call.reliable) open.push_back(id);
  }
  return open;
}

void SimNetwork::timeOut(uint64_t call) {
  finish(call, Error(ErrorCode::kTimeout, "RPC ran for more than set timeout"));
}

void SimNetwork::kill(WorkerId worker) {
  dead_.insert(worker);
  std::vector<Task> tasks;  // destroyed after the lists have been searched
  std::vector<Call> calls;
  std::erase_if(tasks_, [&](auto& task) {
    if (task.node != worker) return false;
    tasks.push_back(std::move(task));
    return true;
  });
  for (auto it = calls_.begin(); it != calls_.end();) {
    const auto call = it++;
    if (call->second.from == worker) calls.push_back(std::move(calls_.extract(call).mapped()));
  }
  std::erase_if(notices_, [&](const Notice& notice) { return notice.survivor == worker; });
  for (const auto& node : nodes_) {
    if (alive(node->self().id)) notices_.push_back({node->self().id, worker});
  }
}

void SimNetwork::notify(size_t index) {
  const auto notice = notices_.at(index);
  notices_.erase(notices_.begin() + static_cast<ptrdiff_t>(index));
  noticed_.insert({notice.survivor, notice.lost});
  const auto fail_calls = [&] {
    std::vector<uint64_t> lost;
    for (const auto& [id, call] : calls_) {
      if (call.from == notice.survivor && call.to == notice.lost) lost.push_back(id);
    }
    const auto name = info(notice.lost).name;
    for (const auto call : lost) {
      on_undelivered(notice.survivor, calls_.at(call).message);
      finish(call, Error(ErrorCode::kWorkerLost, name + " is lost", name));
    }
  };
  const bool calls_first = (notice.survivor + notice.lost) % 2 == 0;  // an agent may do either
  if (calls_first) fail_calls();
  on_lost(notice.survivor, info(notice.lost));
  if (!calls_first) fail_calls();
}

void SimNetwork::drain() {
  while (!packets_.empty() || !tasks_.empty() || !notices_.empty()) {
    if (!packets_.empty()) deliver(0);
    if (!tasks_.empty()) runTask(0);
    if (!notices_.empty()) notify(0);
  }
}

int SimNetwork::find(Kind kind, bool reply) const {
  for (size_t i = 0; i < packets_.size(); ++i) {
    if (packets_[i].kind == kind && packets_[i].reply == reply) return static_cast<int>(i);
  }
  return -1;
}

bool SimNetwork::deliverFirst(Kind kind, bool reply) {
  const auto index = find(kind, reply);
  if (index < 0) return false;
  deliver(static_cast<size_t>(index));
  return true;
}

size_t SimNetwork::count(Kind kind, bool reply) const {
  size_t n = 0;
  for (const auto& packet : packets_) n += packet.kind == kind && packet.reply == reply;
  return n;
}

}  // namespace torchrpc::testing
