// Listens, opens, and keeps who is in the middle of a handshake. What comes after that is NativeConnection's.
//
// Note [Strangers]
// Whoever reaches the port may connect. Until its greeting is complete a peer is a NativeGreeter: one descriptor and a
// few hundred bytes, gone at its deadline, or sooner when more than `unproven_peers` wait (the oldest goes), or when
// the process runs out of descriptors. None of that touches connections that are open. Where the group has a secret,
// who does not prove to know it never becomes a NativeConnection, which reads frames.

#include "transport/native_transport.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <list>
#include <mutex>

#include "base/random.h"
#include "transport/host_address.h"
#include "transport/native_address.h"
#include "transport/native_connection.h"
#include "transport/native_greeter.h"
#include "transport/native_ring.h"

namespace torchrpc {

namespace {

constexpr int kAcceptsATurn = 64;
constexpr auto kAcceptPause = std::chrono::milliseconds(50);

class NativeTransport : public Transport {
 public:
  explicit NativeTransport(NativeOptions options)
      : options_(std::move(options)),
        address_(chooseHostAddress({options_.host, options_.rendezvous_host})),
        host_(options_.unix_sockets ? hostIdentity() : ""),
        shared_(std::make_shared<NativeShared>(options_.limits, options_.longest_spin, options_.secret)) {}
  ~NativeTransport() override { close(); }

  std::string listen(Acceptor acceptor) override;
  std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) override;
  void close() override;
  bool inLoop() const override { return LoopScope::in(shared_->callbacks); }
  void assist(const std::function<bool()>& done) override { shared_->loop.assist(done); }
  void sleep(const std::function<bool()>& done, Alarm& alarm, TimePoint latest, bool gives_way) override {
    shared_->loop.sleep(done, alarm, latest, gives_way);
  }
  std::string describe() const override {
    return host_.empty() ? "native(tcp)" : options_.shared_memory ? "native(shm,tcp)" : "native(unix,tcp)";
  }
  std::map<std::string, std::string> metrics() const override;

 private:
  struct Listener {
    Descriptor socket;
    bool tcp = false;
    NativeLoop::Watch watch{};
    NativeLoop::Watch pause{};
  };
  using Greeters = std::list<std::unique_ptr<NativeGreeter>>;

  Descriptor listenOnTcp() const;
  // On the loop.
  void startAccepting(Listener& listener);
  void acceptMany(Listener& listener);
  void dropOldestCaller();
  void greet(Descriptor socket, bool tcp);
  void onMet(NativeGreeter::Met met, bool tcp);
  void dial(const std::shared_ptr<NativeConnection>& connection, const SocketAddress& to, const NativeAddress& address);
  void open(NativeConnection& connection, NativeGreeter::Met met, bool opener);
  void closeAll();

  // Constant after construction.
  const NativeOptions options_;
  const std::string address_;
  const std::string host_;  ///< empty: no Unix sockets
  const std::shared_ptr<NativeShared> shared_;

  // Own synchronization.
  std::once_flag close_once_;

  // Written by listen(), before the loop reads it.
  Acceptor acceptor_;
  NativeAddress own_;

  // On the loop only.
  std::list<Listener> listeners_;
  Greeters callers_;  ///< unproven, the oldest first
  Greeters calls_;    ///< our own
};

std::map<std::string, std::string> NativeTransport::metrics() const {
  return {
      {"transport.accepted_peers", std::to_string(shared_->accepted.load())},
      {"transport.refused_peers", std::to_string(shared_->refused.load())},
  };
}

// ---- listening ----

std::string NativeTransport::listen(Acceptor acceptor) {
  own_.id = randomNumber();
  std::list<Listener> listeners;
  listeners.push_back({listenOnTcp(), true});
  own_.tcp = SocketAddress::textOf(listeners.back().socket.get());
  if (!host_.empty()) {
    own_.host = host_;
    own_.unix_name = "torchrpc-" + std::to_string(own_.id);
    listeners.push_back({SocketAddress::abstract(own_.unix_name)->listen("a Unix socket"), false});
  }
  acceptor_ = std::move(acceptor);
  auto moved = std::make_shared<std::list<Listener>>(std::move(listeners));
  const bool posted = shared_->loop.post([this, moved] {
    if (shared_->callbacks.closed()) return;
    listeners_.splice(listeners_.end(), *moved);
    for (auto& listener : listeners_) startAccepting(listener);
  });
  if (!posted) throw Error(ErrorCode::kShutdown, "cannot listen: the transport is closed");
  return own_.text();
}

Descriptor NativeTransport::listenOnTcp() const {
  const auto [first, last] = options_.ports;
  for (uint32_t port = first;; ++port) {
    const auto place = bracketed(address_) + ":" + std::to_string(port);
    try {
      return SocketAddress::tcp(place)->listen(port == 0 ? address_ : place);
    } catch (const Error& error) {
      if (first == last) throw;
      if (port < last) continue;
      throw Error(
          error.code(),
          "no port from " + std::to_string(first) + " to " + std::to_string(last) + " is free on " + address_ +
              ": give a larger range by the option port or TORCHRPC_PORT. The last: " + error.text());
    }
  }
}

void NativeTransport::startAccepting(Listener& listener) {
  listener.watch = shared_->loop.watch(listener.socket.get(), [&](NativeLoop::Ready) { acceptMany(listener); });
  listener.watch.want(true, false);
}

void NativeTransport::acceptMany(Listener& listener) {
  for (int i = 0; i < kAcceptsATurn; ++i) {
    Descriptor socket(::accept4(listener.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      greet(std::move(socket), listener.tcp);
    } else if (errno == EAGAIN) {
      return;
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // The listener stays ready, so looking again at once would burn the core.
      TORCH_WARN_ONCE("torchrpc cannot accept a connection: ", socketErrorText(errno));
      dropOldestCaller();
      listener.watch.want(false, false);
      listener.pause = shared_->loop.after(kAcceptPause, [&listener] { listener.watch.want(true, false); });
      return;
    }  // else: this one has gone again
  }
}

void NativeTransport::dropOldestCaller() {
  if (callers_.empty()) return;
  ++shared_->refused;
  callers_.pop_front();
}

void NativeTransport::greet(Descriptor socket, bool tcp) {
  if (callers_.size() >= options_.unproven_peers) dropOldestCaller();
  const auto place = callers_.insert(callers_.end(), nullptr);
  const bool shares = !tcp && options_.shared_memory;
  Greeting self{
      .flags = shares ? Greeting::kSharedMemory : uint16_t{0},
      .listener = own_.id,
      .group = options_.group,
      .name = options_.node_name};
  *place = std::make_unique<NativeGreeter>(
      *shared_, std::move(socket), std::move(self), &RingMemory::make,
      [this, place, tcp](Result<NativeGreeter::Met> met) {
        const auto greeter = std::move(*place);
        callers_.erase(place);
        if (met) onMet(std::move(met).value(), tcp);
      });
  (*place)->start(options_.handshake_deadline);
}

void NativeTransport::onMet(NativeGreeter::Met met, bool tcp) {
  shared_->loop.takeTurn();
  ++shared_->accepted;
  if (tcp) tuneTcp(met.socket.get());
  if (!shared_->callbacks.begin()) return;
  auto connection =
      std::make_shared<NativeConnection>(shared_, met.peer.name, tcp ? "accepted over tcp" : "accepted over unix");
  std::shared_ptr<ConnectionHandler> handler;
  {
    LoopScope scope(shared_->callbacks);
    handler = acceptor_(connection);
  }
  if (!handler) return shared_->callbacks.end();
  connection->setHandler(std::move(handler));
  shared_->connections.insert(connection);
  open(*connection, std::move(met), false);
}

// ---- opening ----

std::shared_ptr<Connection> NativeTransport::connect(
    const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) {
  const auto parsed = NativeAddress::parse(address);
  const bool near = !host_.empty() && parsed.host == host_;
  const auto to = near ? SocketAddress::abstract(parsed.unix_name) : SocketAddress::tcp(parsed.tcp);
  const Error closed(ErrorCode::kShutdown, "cannot connect to " + peer_name + ": the transport is closed", peer_name);
  if (!shared_->callbacks.begin()) throw closed;
  auto connection =
      std::make_shared<NativeConnection>(shared_, peer_name, near ? "unix " + parsed.unix_name : "tcp " + parsed.tcp);
  const bool posted = shared_->loop.post([this, connection, to = *to, parsed, handler] {
    connection->setHandler(handler);
    shared_->connections.insert(connection);
    // close() may have been here before.
    if (shared_->callbacks.closed()) return connection->finish(ErrorCode::kShutdown, {});
    dial(connection, to, parsed);
  });
  if (posted) return connection;
  shared_->callbacks.end();
  throw closed;
}

void NativeTransport::dial(
    const std::shared_ptr<NativeConnection>& connection, const SocketAddress& to, const NativeAddress& address) {
  const auto place = calls_.insert(calls_.end(), nullptr);
  const bool shares = !to.isTcp() && options_.shared_memory;
  Greeting hello{
      .flags = shares ? Greeting::kSharedMemory : uint16_t{0},
      .listener = address.id,
      .group = options_.group,
      .name = options_.node_name};
  *place = std::make_unique<NativeGreeter>(
      *shared_, to, std::move(hello), [this, place, connection](Result<NativeGreeter::Met> met) {
        shared_->loop.takeTurn();
        const auto greeter = std::move(*place);
        calls_.erase(place);
        if (!met) return connection->finish(met.error().code(), met.error().text());
        open(*connection, std::move(met).value(), true);
      });
  (*place)->start(options_.handshake_deadline);
}

void NativeTransport::open(NativeConnection& connection, NativeGreeter::Met met, bool opener) {
  const int fd = met.socket.get();
  if (!met.memory) return connection.open(makeSocketStream(std::move(met.socket)), fd);
  try {
    connection.open(makeRingStream(std::move(met.socket), met.memory, opener, options_.blocks), fd);
  } catch (const Error& error) {
    connection.finish(error.code(), error.text());
  }
}

// ---- the end ----

void NativeTransport::closeAll() {
  listeners_.clear();
  callers_.clear();
  calls_.clear();
  for (const auto connections = shared_->connections; const auto& connection : connections) {
    connection->finish(ErrorCode::kShutdown, {});
  }
}

void NativeTransport::close() {
  std::call_once(close_once_, [this] {
    shared_->callbacks.close();
    shared_->loop.post([this] { closeAll(); });
    shared_->loop.stop();
    shared_->callbacks.wait();
  });
}

}  // namespace

std::unique_ptr<Transport> makeNativeTransport(NativeOptions options) {
  return std::make_unique<NativeTransport>(std::move(options));
}

}  // namespace torchrpc
