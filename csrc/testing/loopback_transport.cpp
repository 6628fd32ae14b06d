// The network is a table of endpoints. An endpoint is the part of a transport that may outlive it: its loop and its
// connections. Each connection has two sides (LoopbackConnection), each of which acts only on the loop of its own
// endpoint. All events of a side are tasks on that loop, so events keep their order: frames that were sent before a
// close arrive before it.

#include "testing/loopback_transport.h"

#include <atomic>
#include <charconv>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "base/executor/task_thread.h"
#include "base/sync/mutex.h"
#include "transport/disposal.h"
#include "transport/frame_memory.h"

namespace torchrpc {

namespace {

constexpr std::string_view kLoopbackScheme = "loopback:";

class LoopbackConnection;

/// The part of a transport to which peers may refer after the transport has been destroyed.
struct Endpoint {
  Endpoint(Limits limits, std::optional<PeerIdentity> identity) : limits(limits), identity(std::move(identity)) {}

  // Constant after construction (acceptor: after the endpoint was added to the network).
  const Limits limits;
  const std::optional<PeerIdentity> identity;
  Transport::Acceptor acceptor;
  TaskThread loop;
  Disposal disposal;

  // Guarded by mutex.
  Mutex mutex;
  bool closed TORCHRPC_GUARDED_BY(mutex) = false;
  std::unordered_set<std::shared_ptr<LoopbackConnection>> connections TORCHRPC_GUARDED_BY(mutex);
};

/// Replaces the segments by copies, and returns them.
std::vector<Segment> copySegments(Frame& frame) {
  std::vector<Segment> copied;
  for (auto& segment : frame.segments) {
    auto copy = newSegment(segment.bytes);
    if (segment.bytes > 0) std::memcpy(copy.mutableData(), segment.data(), segment.bytes);
    copied.push_back(std::exchange(segment, std::move(copy)));
  }
  return copied;
}

class LoopbackConnection : public Connection, public std::enable_shared_from_this<LoopbackConnection> {
 public:
  LoopbackConnection(std::shared_ptr<Endpoint> endpoint, std::string peer, std::shared_ptr<ConnectionHandler> handler)
      : endpoint_(std::move(endpoint)), peer_(std::move(peer)), handler_(std::move(handler)) {}

  /// Called before any other thread knows either side.
  static void join(const std::shared_ptr<LoopbackConnection>& one, const std::shared_ptr<LoopbackConnection>& other) {
    one->other_ = other;
    other->other_ = one;
  }

  /// Makes the endpoint keep this side alive until the connection ends. Returns false if the endpoint is closed.
  bool addToEndpoint() {
    MutexLock lock(endpoint_->mutex);
    if (endpoint_->closed) return false;
    endpoint_->connections.insert(shared_from_this());
    return true;
  }

  void send(Frame&& frame, SentHandler&& done) override { done(trySend(std::move(frame))); }
  void close() override { end({ErrorCode::kShutdown, "the connection to " + peer_ + " was closed from this side"}); }
  std::string describe() const override { return "loopback connection to " + peer_; }

  void end(Error reason) {
    open_ = false;
    endpoint_->loop.post([self = shared_from_this(), reason = std::move(reason)] { self->finish(reason); });
  }

  /// Called on the loop, before any other event.
  void accept() {
    if (addToEndpoint()) handler_ = endpoint_->acceptor(shared_from_this());
    if (!handler_) return finish({ErrorCode::kShutdown, "the acceptor refused it"});
    reportIdentity();
  }

  /// On the loop, before any frame.
  void reportIdentity() {
    const auto other = other_.lock();
    if (handler_ && other && other->endpoint_->identity) handler_->onIdentity(*other->endpoint_->identity);
  }

 private:
  Status trySend(Frame&& frame) {
    if (auto error = checkFrame(frame, endpoint_->limits)) return error;
    auto other = open_ ? other_.lock() : nullptr;
    if (other) {
      // The head was moved in, and has no other owner.
      endpoint_->disposal.drop({.segments = copySegments(frame)});
      auto deliver = [other, frame = std::move(frame)]() mutable { other->onFrame(std::move(frame)); };
      if (other->endpoint_->loop.post(std::move(deliver))) return std::nullopt;
    }
    return Error(ErrorCode::kWorkerLost, "the connection to " + peer_ + " is closed", peer_);
  }

  // On the loop.
  void onFrame(Frame&& frame) {
    if (!handler_) return;
    if (auto error = checkFrame(frame, endpoint_->limits)) return finish(*error);
    handler_->onFrame(std::move(frame));
  }
  void finish(const Error& reason) {
    if (std::exchange(finished_, true)) return;
    open_ = false;
    {
      MutexLock lock(endpoint_->mutex);
      endpoint_->connections.erase(shared_from_this());
    }
    if (auto handler = std::move(handler_)) handler->onClosed(reason);
    if (auto other = other_.lock()) {
      other->end(
          {ErrorCode::kWorkerLost, "the connection to " + other->peer_ + " was closed from there", other->peer_});
    }
  }

  // Constant after construction (other_: after join).
  const std::shared_ptr<Endpoint> endpoint_;
  const std::string peer_;
  std::weak_ptr<LoopbackConnection> other_;

  std::atomic<bool> open_{true};

  // On the loop only, once constructed.
  std::shared_ptr<ConnectionHandler> handler_;
  bool finished_ = false;
};

}  // namespace

class LoopbackNetwork {
 public:
  uint64_t add(std::shared_ptr<Endpoint> endpoint) {
    MutexLock lock(mutex_);
    endpoints_[++last_] = std::move(endpoint);
    return last_;
  }
  void remove(uint64_t number) {
    std::shared_ptr<Endpoint> dropped;  // destroyed after the lock
    MutexLock lock(mutex_);
    auto found = endpoints_.find(number);
    if (found == endpoints_.end()) return;
    dropped = std::move(found->second);
    endpoints_.erase(found);
  }
  std::shared_ptr<Endpoint> find(uint64_t number) {
    MutexLock lock(mutex_);
    auto found = endpoints_.find(number);
    return found == endpoints_.end() ? nullptr : found->second;
  }

 private:
  // Guarded by mutex_.
  Mutex mutex_;
  uint64_t last_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Endpoint>> endpoints_ TORCHRPC_GUARDED_BY(mutex_);
};

namespace {

uint64_t parseAddress(const std::string& address) {
  uint64_t number = 0;
  std::string_view text = address;
  if (text.starts_with(kLoopbackScheme)) {
    text.remove_prefix(kLoopbackScheme.size());
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc() && end == text.data() + text.size()) return number;
  }
  throw Error(
      ErrorCode::kInvalidArgument, "'" + address + "' is not the address of a loopback transport (loopback:<n>)");
}

class LoopbackTransport : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<LoopbackNetwork> network, Limits limits, std::optional<PeerIdentity> identity)
      : network_(std::move(network)), endpoint_(std::make_shared<Endpoint>(limits, std::move(identity))) {}
  ~LoopbackTransport() override { close(); }

  std::string listen(Acceptor acceptor) override {
    endpoint_->acceptor = std::move(acceptor);
    number_ = network_->add(endpoint_);
    return std::string(kLoopbackScheme) + std::to_string(number_);
  }

  std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) override {
    const auto number = parseAddress(address);
    auto near = std::make_shared<LoopbackConnection>(endpoint_, peer_name, std::move(handler));
    if (!near->addToEndpoint())
      throw Error(ErrorCode::kShutdown, "cannot connect to " + peer_name + ": the transport is closed");
    auto endpoint = network_->find(number);
    auto far =
        endpoint ? std::make_shared<LoopbackConnection>(endpoint, "the peer at " + describe(), nullptr) : nullptr;
    if (far) {
      LoopbackConnection::join(near, far);
      endpoint_->loop.post([near] { near->reportIdentity(); });
    }
    if (!far || !endpoint->loop.post([far] { far->accept(); })) {
      near->end({ErrorCode::kWorkerLost, "no worker listens at " + address + " (" + peer_name + ")", peer_name});
    }
    return near;
  }

  void close() override {
    std::call_once(close_once_, [this] {
      network_->remove(number_);
      decltype(endpoint_->connections) connections;
      {
        MutexLock lock(endpoint_->mutex);
        endpoint_->closed = true;
        connections = endpoint_->connections;
      }
      for (const auto& connection : connections) connection->close();
      endpoint_->loop.stop();
      endpoint_->disposal.stop();
    });
  }

  bool inLoop() const override { return endpoint_->loop.inLoop(); }
  std::string describe() const override {
    return std::string(kLoopbackScheme) + (number_ ? std::to_string(number_) : "-");
  }

 private:
  // Constant after construction (number_: after listen()).
  const std::shared_ptr<LoopbackNetwork> network_;
  const std::shared_ptr<Endpoint> endpoint_;
  std::atomic<uint64_t> number_{0};  // 0: not listening

  std::once_flag close_once_;
};

}  // namespace

std::shared_ptr<LoopbackNetwork> makeLoopbackNetwork() { return std::make_shared<LoopbackNetwork>(); }

std::unique_ptr<Transport> makeLoopbackTransport(
    std::shared_ptr<LoopbackNetwork> network, Limits limits, std::optional<PeerIdentity> identity) {
  return std::make_unique<LoopbackTransport>(std::move(network), limits, std::move(identity));
}

}  // namespace torchrpc
