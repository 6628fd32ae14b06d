#include "testing/simulated_network.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/frame_memory.h"

namespace torchrpc {

namespace {

constexpr std::string_view kSimulatedScheme = "simulated:";

/// Smaller frames are sent at once, unless other frames wait before them.
constexpr size_t kQueuedFrameBytes = 32 << 10;
constexpr int64_t kBytesPerMicrosecond = 100;

size_t sizeOf(const Frame& frame) {
  size_t bytes = frame.head.size();
  for (const auto& segment : frame.segments) bytes += segment.bytes;
  return bytes;
}

class SimulatedConnection;
using SimulatedConnectionPtr = std::shared_ptr<SimulatedConnection>;

/// The part of a transport that its connections know.
struct SimulatedEndpoint {
  Simulation::ProcessPtr process;
  SimulatedNetwork::Handshake handshake{};
  std::string address{};  ///< empty: it does not listen
  Transport::Acceptor acceptor{};
  bool is_closed = false;
  std::vector<SimulatedConnectionPtr> connections{};

  std::string name() const { return handshake.identity ? handshake.identity->name : handshake.name; }
};
using SimulatedEndpointPtr = std::shared_ptr<SimulatedEndpoint>;

}  // namespace

struct SimulatedNetwork::State {
  explicit State(Simulation& simulation) : simulation(simulation) {}

  Simulation& simulation;
  Latency latency;
  uint64_t next_address = 1;
  std::map<std::string, SimulatedEndpointPtr> listeners;
  std::unordered_map<const Simulation::Process*, std::weak_ptr<SimulatedEndpoint>> endpoints;  ///< of live transports
  Traffic traffic;
  SimulatedNetwork::FrameObserver observer;

  TimePoint arrival() {
    const bool is_slow = latency.slow_percent > 0 && simulation.chance(latency.slow_percent);
    return simulation.now() + simulation.between(latency.shortest, is_slow ? latency.slowest : latency.longest);
  }
  SimulatedEndpointPtr find(const Simulation::ProcessPtr& process) const {
    const auto found = endpoints.find(process.get());
    return found == endpoints.end() ? nullptr : found->second.lock();
  }
};

namespace {

using NetworkState = std::shared_ptr<SimulatedNetwork::State>;

/// One side of a connection. All its events are events of its own process.
class SimulatedConnection final : public Connection, public std::enable_shared_from_this<SimulatedConnection> {
 public:
  SimulatedConnection(
      NetworkState network, SimulatedEndpointPtr endpoint, std::string peer_name,
      std::shared_ptr<ConnectionHandler> handler)
      : network_(std::move(network)),
        endpoint_(std::move(endpoint)),
        peer_name_(std::move(peer_name)),
        handler_(std::move(handler)) {}

  static void join(const SimulatedConnectionPtr& one, const SimulatedConnectionPtr& other) {
    one->other_ = other;
    other->other_ = one;
  }

  void send(Frame&& frame, SentHandler&& done) override {
    if (auto error = checkSend(frame)) return done(std::move(error));
    const auto bytes = sizeOf(frame);
    ++network_->traffic.frames;
    network_->traffic.bytes += bytes;
    if (queue_.empty() && bytes < kQueuedFrameBytes) {
      deliver(std::move(frame));
      return done(std::nullopt);
    }
    auto& simulation = network_->simulation;
    const Duration needed = std::chrono::microseconds(static_cast<int64_t>(bytes) / kBytesPerMicrosecond);
    last_sent_ = std::max(last_sent_, simulation.now()) + simulation.between({}, needed);
    queue_.push_back({std::move(frame), std::move(done)});
    simulation.at(last_sent_, endpoint_->process, [self = shared_from_this()] { self->sendNext(); });
  }
  void close() override {
    if (!std::exchange(is_open_, false)) return;
    finishLater(
        network_->simulation.now(),
        {ErrorCode::kShutdown, "the connection to " + peer_name_ + " was closed from this side"});
  }
  std::string describe() const override { return "simulated connection to " + peer_name_; }

  const SimulatedEndpointPtr& endpoint() const { return endpoint_; }
  SimulatedConnectionPtr other() const { return other_.lock(); }

  /// Called on the listener's side when the connection arrives.
  void accept() {
    if (is_finished_) return;
    handler_ = endpoint_->acceptor(shared_from_this());
    if (!handler_) return finish({ErrorCode::kShutdown, "the acceptor refused it"});
    const auto other = this->other();
    if (!other) return;
    reportHandshake(other->endpoint_->handshake);
    if (!other->endpoint_->handshake.identity && !other->endpoint_->handshake.name.empty()) {
      handler_->onClaimedName(other->endpoint_->handshake.name);
    }
  }
  /// Called on both sides before the first frame arrives.
  void reportHandshake(const SimulatedNetwork::Handshake& peer) {
    if (handler_ && peer.identity) handler_->onIdentity(*peer.identity);
  }
  /// Cuts the connection: what either side sends is lost, and each side learns of it at its own time.
  void cut() {
    if (std::exchange(is_cut_, true)) return;
    if (network_->simulation.chance(50)) is_deaf_ = true;
    const auto delay = network_->simulation.between({}, std::chrono::seconds(1));
    finishLater(network_->simulation.now() + delay, {ErrorCode::kWorkerLost, "the network was cut", peer_name_});
    if (const auto other = this->other()) other->cut();
  }
  bool isCut() const { return is_cut_; }
  /// Called when the process has crashed: this side has no effect on the other one any more.
  void detach() { other_.reset(); }

  /// Called when the peer has ended: this side learns of it after the frames in flight.
  void finishAfterFrames(const Error& reason) {
    last_arrival_ = std::max(last_arrival_, network_->arrival());
    finishLater(last_arrival_, reason);
  }
  void finish(const Error& reason) {
    if (std::exchange(is_finished_, true)) return;
    is_open_ = false;
    const auto self = shared_from_this();
    std::erase(endpoint_->connections, self);
    if (network_->simulation.isTracing()) {
      network_->simulation.trace(
          endpoint_->process->name + "  connection to " + peer_name_ + " ends: " + reason.text());
    }
    for (auto& each : std::exchange(queue_, {})) each.done(reason);
    if (const auto handler = std::exchange(handler_, nullptr)) handler->onClosed(reason);
    const auto other = this->other();
    if (other && !is_cut_) {
      other->finishAfterFrames({ErrorCode::kWorkerLost, "the peer closed the connection", other->peer_name_});
    }
  }

 private:
  struct Queued {
    Frame frame;
    SentHandler done;
  };

  Status checkSend(const Frame& frame) const {
    if (auto error = checkFrame(frame, {})) return error;
    if (is_open_) return std::nullopt;
    return Error(ErrorCode::kWorkerLost, "the connection to " + peer_name_ + " is closed", peer_name_);
  }
  /// The first frame of the queue has left.
  void sendNext() {
    if (queue_.empty()) return;  // the connection has ended, and the frames with it
    auto next = std::move(queue_.front());
    queue_.pop_front();
    deliver(std::move(next.frame));
    next.done(std::nullopt);
  }
  void deliver(Frame&& frame) {
    const auto other = this->other();
    if (!other || is_cut_ || endpoint_->process->has_crashed) return;  // it is lost on its way
    if (network_->observer) network_->observer(*endpoint_->process, *other->endpoint_->process, frame);
    for (auto& segment : frame.segments) {
      auto copy = newSegment(segment.bytes);
      if (segment.bytes > 0) std::memcpy(copy.mutableData(), segment.data(), segment.bytes);
      segment = std::move(copy);
    }
    other->last_arrival_ = std::max(other->last_arrival_, network_->arrival());
    auto arrive = [other, frame = std::move(frame)]() mutable { other->onFrame(std::move(frame)); };
    // std::function copies what it holds, and a frame in flight has one owner.
    network_->simulation.at(
        other->last_arrival_, other->endpoint_->process,
        [arrive = std::make_shared<decltype(arrive)>(std::move(arrive))] { (*arrive)(); });
  }

  void onFrame(Frame&& frame) {
    if (network_->simulation.isTracing()) traceFrame(frame);
    if (handler_ && !is_deaf_) handler_->onFrame(std::move(frame));
  }
  void traceFrame(const Frame& frame) const {
    const auto info = peekFrame(frame.head);
    auto text = info ? std::string(name(info->kind)) : "an unreadable frame";
    if (info && info->call != 0) text += " #" + std::to_string(info->call);
    text += is_deaf_ ? " is lost" : handler_ ? " arrives" : " arrives at a closed connection";
    network_->simulation.trace(peer_name_ + " -> " + endpoint_->process->name + "  " + text);
  }
  void finishLater(TimePoint when, Error reason) {
    network_->simulation.at(
        when, endpoint_->process, [self = shared_from_this(), reason = std::move(reason)] { self->finish(reason); });
  }

  const NetworkState network_;
  const SimulatedEndpointPtr endpoint_;
  const std::string peer_name_;
  std::weak_ptr<SimulatedConnection> other_;
  std::shared_ptr<ConnectionHandler> handler_;
  std::deque<Queued> queue_;  ///< frames that have not left yet
  TimePoint last_sent_{};     ///< when the last of them leaves
  TimePoint last_arrival_{};
  bool is_open_ = true;       ///< frames can be sent
  bool is_cut_ = false;       ///< frames that are sent are lost
  bool is_deaf_ = false;      ///< frames that arrive are lost
  bool is_finished_ = false;  ///< its handler has been told that it has ended
};

class SimulatedTransport final : public Transport {
 public:
  SimulatedTransport(NetworkState network, SimulatedEndpointPtr endpoint)
      : network_(std::move(network)), endpoint_(std::move(endpoint)) {}
  ~SimulatedTransport() override {
    close();
    network_->endpoints.erase(endpoint_->process.get());
  }

  std::string listen(Acceptor acceptor) override {
    endpoint_->acceptor = std::move(acceptor);
    endpoint_->address = std::string(kSimulatedScheme) + std::to_string(network_->next_address++);
    network_->listeners[endpoint_->address] = endpoint_;
    return endpoint_->address;
  }

  std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) override {
    if (!address.starts_with(kSimulatedScheme))
      throw Error(ErrorCode::kInvalidArgument, "not a simulated address: " + address);
    if (endpoint_->is_closed) throw Error(ErrorCode::kShutdown, "cannot connect: the transport is closed");
    auto near = std::make_shared<SimulatedConnection>(network_, endpoint_, peer_name, std::move(handler));
    endpoint_->connections.push_back(near);
    ++network_->traffic.connections;
    const auto found = network_->listeners.find(address);
    if (found == network_->listeners.end()) {
      near->finishAfterFrames({ErrorCode::kWorkerLost, "no worker listens at " + address, peer_name});
      return near;
    }
    const auto& listener = found->second;
    if (!listener->name().empty() && listener->name() != peer_name) {
      near->finishAfterFrames(
          {ErrorCode::kWorkerLost, listener->name() + " listens at " + address + ", and not " + peer_name, peer_name});
      return near;
    }
    near->reportHandshake(listener->handshake);
    auto far = std::make_shared<SimulatedConnection>(network_, listener, endpoint_->process->name, nullptr);
    listener->connections.push_back(far);
    SimulatedConnection::join(near, far);
    network_->simulation.at(network_->simulation.now(), listener->process, [far] { far->accept(); });
    return near;
  }

  void close() override {
    if (std::exchange(endpoint_->is_closed, true)) return;
    if (!endpoint_->process->has_crashed) network_->listeners.erase(endpoint_->address);
    const Error reason(ErrorCode::kShutdown, "the transport was closed");
    while (!endpoint_->connections.empty()) endpoint_->connections.back()->finish(reason);
    endpoint_->acceptor = nullptr;
  }

  bool inLoop() const override { return false; }
  void poll(const std::function<bool()>& done) override { network_->simulation.waitUntil(endpoint_->process, done); }
  std::string describe() const override { return "simulated"; }

 private:
  const NetworkState network_;
  const SimulatedEndpointPtr endpoint_;
};

}  // namespace

SimulatedNetwork::SimulatedNetwork(Simulation& simulation) : state_(std::make_shared<State>(simulation)) {}
SimulatedNetwork::~SimulatedNetwork() {
  // Processes that have crashed silently are still listed, and each refers to its connections.
  for (const auto& [address, endpoint] : state_->listeners) endpoint->connections.clear();
}

void SimulatedNetwork::setLatency(const Latency& latency) { state_->latency = latency; }
SimulatedNetwork::Traffic SimulatedNetwork::traffic() const { return state_->traffic; }

void SimulatedNetwork::observe(FrameObserver observer) { state_->observer = std::move(observer); }

std::unique_ptr<Transport> SimulatedNetwork::makeTransport(Simulation::ProcessPtr process, Handshake handshake) {
  auto endpoint = std::make_shared<SimulatedEndpoint>(
      SimulatedEndpoint{.process = std::move(process), .handshake = std::move(handshake)});
  state_->endpoints[endpoint->process.get()] = endpoint;
  return std::make_unique<SimulatedTransport>(state_, std::move(endpoint));
}

size_t SimulatedNetwork::cut(const Simulation::ProcessPtr& one, const Simulation::ProcessPtr& other) {
  size_t count = 0;
  const auto endpoint = state_->find(one);
  if (!endpoint) return 0;
  for (const auto& each : std::vector(endpoint->connections)) {
    const auto peer = each->other();
    if (!peer || peer->endpoint()->process != other || each->isCut()) continue;
    each->cut();
    ++count;
  }
  return count;
}

void SimulatedNetwork::crash(const Simulation::ProcessPtr& process, Crash kind) {
  state_->simulation.crash(*process);
  const auto endpoint = state_->find(process);
  if (!endpoint) return;
  if (kind == Crash::kReset) state_->listeners.erase(endpoint->address);
  for (const auto& each : std::vector(endpoint->connections)) {
    if (const auto peer = each->other(); peer && kind == Crash::kReset) {
      peer->finishAfterFrames({ErrorCode::kWorkerLost, "the peer's process has ended", process->name});
    }
    each->detach();
  }
}

}  // namespace torchrpc
