// Listens, dials, and owns the pending handshakes. A handshake that completes is replaced by a StreamConnection.
//
// Note [Unauthenticated peers]
// Any process that reaches the port may connect. Until its handshake is complete, a peer is a HandshakeSession: one
// descriptor and a few hundred bytes. The session is closed at its deadline, or sooner: the oldest session is closed
// when more than `max_pending_handshakes` are pending, or when the process runs out of descriptors. A peer that has
// greeted, which means that it has named the listener and the group as only readers of the store can, does not count
// towards this limit: kGreetedFactor limits these peers. Each kind of session makes room for its own, so a flood of one
// kind closes none of the other, and all sessions together have half of the descriptors that the process may open. Open
// connections are not affected. If the group has a secret, a HELLO that has arrived before is refused at once, and a
// peer that does not prove that it knows the secret never becomes a StreamConnection. Only a StreamConnection reads
// frames.
//
// Note [Dialling again]
// A handshake may fail although the peer is alive: the peer is stopped, or it has closed the connection to make room,
// one of the two has no descriptor left, or the network is down. No frame has been sent by then. So the opener dials
// again, after pauses that grow, until the connection is closed on this side: the layer above decides how long to wait
// for the peer. Frames that are sent meanwhile are queued in the connection. If no process listens there any
// more, or if the handshake was refused, the opener gives up at once.

#include "transport/native/transport.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <list>
#include <mutex>
#include <sys/resource.h>

#include "base/log.h"
#include "base/os/sockets.h"
#include "base/random.h"
#include "transport/host_address.h"
#include "transport/native/address.h"
#include "transport/native/auth/handshake_session.h"
#include "transport/native/connection.h"
#include "transport/native/shm/ring.h"

namespace torchrpc::native {

namespace {

constexpr int kMaxAcceptsPerEvent = 64;
constexpr auto kAcceptPause = std::chrono::milliseconds(50);
constexpr Duration kFirstDialPause = std::chrono::milliseconds(20);
constexpr Duration kLongestDialPause = std::chrono::seconds(1);
// The limit of pending handshakes whose peers have greeted, in multiples of `max_pending_handshakes`.
constexpr size_t kGreetedFactor = 16;

/// Returns the number of descriptors that the sessions of each kind may occupy: see Note [Unauthenticated peers].
size_t maxSessionDescriptors() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return std::numeric_limits<size_t>::max();
  return static_cast<size_t>(limit.rlim_cur / 4);
}

class NativeTransport : public Transport {
 public:
  explicit NativeTransport(Options options)
      : shared_(std::make_shared<SharedState>(std::move(options))),
        options_(shared_->options),
        address_(chooseHostAddress({options_.host, options_.rendezvous_host})),
        host_(options_.unix_sockets ? hostIdentity() : "") {}
  ~NativeTransport() override { close(); }

  std::string listen(Acceptor acceptor) override;
  std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) override;
  void close() override;
  bool inLoop() const override { return LoopScope::in(shared_->callbacks); }
  void poll(const std::function<bool()>& done) override { shared_->loop.poll(done); }
  void park(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint deadline, bool preemptible) override {
    shared_->loop.park(done, waiter, deadline, preemptible);
  }
  void afterReading(std::function<void()> done) override;
  std::string describe() const override {
    return host_.empty() ? "native(tcp)" : options_.shared_memory ? "native(shm,tcp)" : "native(unix,tcp)";
  }
  std::map<std::string, std::string> metrics() const override;
  void onRefused(std::function<void(const std::string&, const Error&)> observer) override {
    refusal_observer_ = std::move(observer);
  }

 private:
  struct Listener {
    Descriptor socket;
    bool tcp = false;
    EventLoop::Watch watch{};
    EventLoop::Watch pause{};
  };
  using Handshakes = std::list<std::unique_ptr<HandshakeSession>>;

  Descriptor listenOnTcp() const;
  // On the loop thread; without the loop lock, unless they acquire it.
  void startAccepting(Listener& listener);
  void acceptMany(Listener& listener);
  /// Closes the oldest pending handshakes of each kind beyond its limit, so that there is room for another one.
  void makeRoomForHandshake();
  /// Closes the oldest pending handshake, of the kind of which there are more. Returns false if there is none.
  bool dropOldestHandshake();
  size_t countGreeted() const;
  void dropOldestHandshake(bool has_greeted);
  void startInboundHandshake(Descriptor socket, bool tcp);
  /// Returns the reason to refuse another connection of this worker, or nothing.
  std::optional<std::string> refusalOf(const std::string& peer_name) const;
  void onAuthenticated(HandshakeSession::AuthenticatedPeer peer, bool tcp);
  /// An attempt to open a connection: see Note [Dialling again].
  struct Dial {
    std::shared_ptr<StreamConnection> connection;
    SocketAddress to;
    uint64_t listener = 0;
    std::string peer_name;
    bool shares_memory = false;
    Duration pause = kFirstDialPause;
  };
  void dial(Dial dial);
  void dialAgain(Dial dial, const std::string& reason);
  /// Returns false if there is no address space for the memory that the peer shares: then the connection is not open.
  bool open(StreamConnection& connection, HandshakeSession::AuthenticatedPeer peer, bool opener);
  void closeAll();

  // Constant after construction.
  const std::shared_ptr<SharedState> shared_;
  const Options& options_;
  const std::string address_;
  const std::string host_;  ///< empty: no Unix sockets

  // Own synchronization.
  std::once_flag close_once_;

  // Written by onRefused() and listen(), before the loop reads it.
  std::function<void(const std::string&, const Error&)> refusal_observer_;
  Acceptor acceptor_;
  Address own_;

  // On the loop thread only.
  std::list<Listener> listeners_;
  Handshakes inbound_handshakes_;   ///< of peers that have connected, the oldest first
  Handshakes outbound_handshakes_;  ///< of connections that this side opens
  std::list<EventLoop::Watch> dial_pauses_;
};

std::map<std::string, std::string> NativeTransport::metrics() const {
  return {
      {"transport.accepted_peers", std::to_string(shared_->accepted.load())},
      {"transport.refused_peers", std::to_string(shared_->refused.load())},
      {"transport.key_exchanges", std::to_string(shared_->key_exchanges.load())},
      {"transport.encrypted_connections", std::to_string(shared_->encrypted.load())},
      {"transport.tcp_encryption",
       options_.tls           ? "TLS 1.3"
           : options_.encrypt ? std::string(nameOf(bestCipher()))
                              : "off"},
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
    const auto endpoint = bracketed(address_) + ":" + std::to_string(port);
    try {
      return SocketAddress::tcp(endpoint)->listen(port == 0 ? address_ : endpoint);
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
  listener.watch = shared_->loop.watch(listener.socket.get(), [&](EventLoop::Ready) { acceptMany(listener); });
  listener.watch.setInterest(true, false);
}

void NativeTransport::acceptMany(Listener& listener) {
  for (int i = 0; i < kMaxAcceptsPerEvent; ++i) {
    Descriptor socket(os::acceptSocket(listener.socket.get()));
    if (socket) {
      startInboundHandshake(std::move(socket), listener.tcp);
    } else if (errno == EAGAIN) {
      return;
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // The listener stays ready: without a pause the loop thread would use all of a core.
      static LogOnce once;
      once.log(LogLevel::kWarning, "a connection cannot be accepted: " + socketErrorText(errno));
      if (dropOldestHandshake()) continue;
      listener.watch.setInterest(false, false);
      listener.pause = shared_->loop.after(kAcceptPause, [&listener] { listener.watch.setInterest(true, false); });
      return;
    }  // else: this connection has been closed already
  }
}

size_t NativeTransport::countGreeted() const {
  return static_cast<size_t>(
      std::ranges::count_if(inbound_handshakes_, [](const auto& each) { return each->hasGreeted(); }));
}

void NativeTransport::dropOldestHandshake(bool has_greeted) {
  const auto oldest = std::ranges::find_if(
      inbound_handshakes_, [has_greeted](const auto& each) { return each->hasGreeted() == has_greeted; });
  if (oldest == inbound_handshakes_.end()) return;
  ++shared_->refused;
  const auto dropped = std::move(*oldest);
  inbound_handshakes_.erase(oldest);
  if (!refusal_observer_) return;
  const Error reason(ErrorCode::kTimeout, "it made room for later handshakes, because it was not finished");
  refusal_observer_(dropped->peerName(), reason);
}

bool NativeTransport::dropOldestHandshake() {
  if (inbound_handshakes_.empty()) return false;
  const auto greeted = countGreeted();
  dropOldestHandshake(/*has_greeted=*/greeted > inbound_handshakes_.size() - greeted);
  return true;
}

void NativeTransport::makeRoomForHandshake() {
  const auto limit = options_.max_pending_handshakes;
  const auto descriptors = maxSessionDescriptors();
  if (inbound_handshakes_.size() < std::min(limit, descriptors)) return;
  const auto greeted = countGreeted();
  if (inbound_handshakes_.size() - greeted >= std::min(limit, descriptors)) {
    dropOldestHandshake(/*has_greeted=*/false);
  }
  if (greeted >= std::min(kGreetedFactor * limit, descriptors)) dropOldestHandshake(/*has_greeted=*/true);
}

void NativeTransport::startInboundHandshake(Descriptor socket, bool tcp) {
  makeRoomForHandshake();
  const auto position = inbound_handshakes_.insert(inbound_handshakes_.end(), nullptr);
  *position = std::make_unique<HandshakeSession>(
      *shared_, std::move(socket),
      HandshakeSession::Terms{.listener = own_.id, .is_tcp = tcp, .shares_memory = !tcp && options_.shared_memory},
      [] { return RingMemory::make(); }, [this](const std::string& name) { return refusalOf(name); },
      [this, position, tcp](Result<HandshakeSession::AuthenticatedPeer> peer) {
        const auto session = std::move(*position);  // kept until this callback returns
        inbound_handshakes_.erase(position);
        if (peer) return onAuthenticated(std::move(peer).value(), tcp);
        const bool has_broken = peer.error().code() == ErrorCode::kWorkerLost;
        if (refusal_observer_ && !has_broken) {
          refusal_observer_(session->peerName(), peer.error());
        }
      });
  (*position)->start(options_.handshake_deadline);
}

std::optional<std::string> NativeTransport::refusalOf(const std::string& peer_name) const {
  const auto limit = options_.max_connections_per_peer;
  const auto open = std::ranges::count_if(
      shared_->connections, [&](const auto& each) { return each->isAccepted() && each->peerName() == peer_name; });
  if (static_cast<size_t>(open) < limit) return std::nullopt;
  return "worker " + peer_name + " has opened " + std::to_string(limit) + " connections to this one already";
}

void NativeTransport::onAuthenticated(HandshakeSession::AuthenticatedPeer peer, bool tcp) {
  shared_->loop.lockLoop();
  ++shared_->accepted;
  if (tcp) tuneTcp(peer.socket.get());
  if (refusalOf(peer.name) || !shared_->callbacks.begin()) return;
  auto connection =
      std::make_shared<StreamConnection>(shared_, peer.name, tcp ? "accepted over tcp" : "accepted over unix", true);
  std::shared_ptr<ConnectionHandler> handler;
  {
    LoopScope scope(shared_->callbacks);
    handler = acceptor_(connection);
  }
  if (!handler) return shared_->callbacks.end();
  connection->setHandler(std::move(handler));
  shared_->connections.insert(connection);
  if (!open(*connection, std::move(peer), false)) {
    return connection->closeOnLoop(ErrorCode::kWorkerLost, "there is no address space for its shared memory");
  }
  connection->requireFrame(options_.handshake_deadline);
}

// ---- opening ----

std::shared_ptr<Connection> NativeTransport::connect(
    const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) {
  const auto parsed = Address::parse(address);
  const bool same_host = !host_.empty() && parsed.host == host_;
  const auto to = same_host ? SocketAddress::abstract(parsed.unix_name) : SocketAddress::tcp(parsed.tcp);
  const Error closed(ErrorCode::kShutdown, "cannot connect to " + peer_name + ": the transport is closed", peer_name);
  if (!shared_->callbacks.begin()) throw closed;
  auto connection = std::make_shared<StreamConnection>(
      shared_, peer_name, same_host ? "unix " + parsed.unix_name : "tcp " + parsed.tcp, false);
  const bool posted = shared_->loop.post([this, connection, to = *to, parsed, handler] {
    connection->setHandler(handler);
    shared_->connections.insert(connection);
    // close() may have been called before this task runs.
    if (shared_->callbacks.closed()) return connection->closeOnLoop(ErrorCode::kShutdown, {});
    dial(
        {.connection = connection,
         .to = to,
         .listener = parsed.id,
         .peer_name = connection->peerName(),
         .shares_memory = !to.isTcp() && options_.shared_memory});
  });
  if (posted) return connection;
  shared_->callbacks.end();
  throw closed;
}

void NativeTransport::dial(Dial dial) {
  const auto position = outbound_handshakes_.insert(outbound_handshakes_.end(), nullptr);
  const auto to = dial.to;
  HandshakeSession::Terms terms{
      .listener = dial.listener,
      .is_tcp = to.isTcp(),
      .shares_memory = dial.shares_memory,
      .expected_name = dial.peer_name};
  *position = std::make_unique<HandshakeSession>(
      *shared_, to, std::move(terms),
      [this, position, dial = std::move(dial)](Result<HandshakeSession::AuthenticatedPeer> peer) mutable {
        shared_->loop.lockLoop();
        const auto session = std::move(*position);  // kept until this callback returns
        outbound_handshakes_.erase(position);
        const auto connection = dial.connection;
        if (!peer && session->mayRetry()) return dialAgain(dial, peer.error().text());
        if (!peer) return connection->closeOnLoop(peer.error().code(), peer.error().text());
        if (open(*connection, std::move(peer).value(), true)) return;
        // No frame was sent on the first socket: to the peer, its end is that of an unauthenticated connection.
        dial.shares_memory = false;
        this->dial(dial);
      });
  (*position)->start(options_.handshake_deadline);
}

void NativeTransport::dialAgain(Dial dial, const std::string& reason) {
  if (dial.connection->isClosed()) return;
  dial.connection->noteFailedAttempt(reason);
  const auto pause = dial.pause + dial.pause * static_cast<int>(randomNumber() % 8) / 8;  // many may dial one worker
  dial.pause = std::min(2 * dial.pause, kLongestDialPause);
  const auto position = dial_pauses_.insert(dial_pauses_.end(), EventLoop::Watch());
  *position = shared_->loop.after(pause, [this, position, dial = std::move(dial)] {
    shared_->loop.lockLoop();
    const auto pause = std::move(*position);  // kept until this callback returns
    dial_pauses_.erase(position);
    if (!dial.connection->isClosed()) this->dial(dial);
  });
}

bool NativeTransport::open(StreamConnection& connection, HandshakeSession::AuthenticatedPeer peer, bool opener) {
  const int fd = peer.socket.get();
  if (peer.tls || peer.keys) ++shared_->encrypted;
  try {
    auto stream = peer.memory ? makeRingStream(std::move(peer.socket), peer.memory, opener, options_.slabs)
        : peer.tls            ? makeTlsStream(std::move(peer.socket), std::move(peer.tls))
        : peer.keys           ? makeSealedStream(std::move(peer.socket), *peer.keys)
                              : makeSocketStream(std::move(peer.socket));
    connection.open(std::move(stream), fd, peer.identity);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kWorkerLost) {
      static LogOnce once;
      once.log(LogLevel::kWarning, "no memory is shared with " + peer.name + ": " + error.text());
      return false;
    }
    connection.closeOnLoop(error.code(), error.text());
  }
  return true;
}

// ---- the end ----

void NativeTransport::closeAll() {
  listeners_.clear();
  inbound_handshakes_.clear();
  outbound_handshakes_.clear();
  dial_pauses_.clear();
  for (const auto connections = shared_->connections; const auto& connection : connections) {
    connection->closeOnLoop(ErrorCode::kShutdown, {});
  }
}

// A task that a task posts runs in the next round of the loop, after the sockets and rings that were ready in this
// round.
void NativeTransport::afterReading(std::function<void()> done) {
  shared_->loop.post([this, done = std::move(done)]() mutable {
    shared_->loop.post([this, done = std::move(done)] {
      if (shared_->callbacks.closed()) return;
      const LoopScope scope(shared_->callbacks);
      done();
    });
  });
}

void NativeTransport::close() {
  std::call_once(close_once_, [this] {
    shared_->callbacks.close();
    shared_->loop.post([this] { closeAll(); });
    shared_->loop.stop();
    shared_->callbacks.wait();
    shared_->disposal.stop();
  });
}

}  // namespace

std::unique_ptr<Transport> makeTransport(Options options) {
  initializeSodium();
  if (options.encrypt && options.secret.empty()) {
    throwInvalidArgument("encryption='" + options.encryption + "' needs a secret, and this group has none");
  }
  return std::make_unique<NativeTransport>(std::move(options));
}

}  // namespace torchrpc::native
