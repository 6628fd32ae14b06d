#include "transport/native/auth/handshake_session.h"

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "base/random.h"
#include "transport/native/auth/proof.h"

namespace torchrpc::native {

namespace {
// connect() to a Unix socket fails at once (EAGAIN) if the listener's backlog is full, where TCP would wait.
constexpr auto kBacklogRetryDelay = std::chrono::milliseconds(2);

const std::string kRemedy =
    ": give all workers of the group the same secret (TORCHRPC_SECRET_FILE, TORCHRPC_SECRET or the option secret), or "
    "give none and let it come through the store";

/// The bytes of a message as they enter the proof that the message itself carries.
std::string withoutProof(HandshakeMessage message) {
  message.proof.clear();
  return message.bytes();
}
}  // namespace

HandshakeSession::HandshakeSession(
    SharedState& shared, Descriptor accepted, HandshakeMessage self, MemoryFactory make_memory, Done done)
    : shared_(shared),
      opener_(false),
      self_(std::move(self)),
      make_memory_(std::move(make_memory)),
      done_(std::move(done)),
      socket_(std::move(accepted)),
      connected_(true) {}

HandshakeSession::HandshakeSession(SharedState& shared, SocketAddress address, HandshakeMessage hello, Done done)
    : shared_(shared),
      opener_(true),
      address_(address),
      self_(std::move(hello)),
      done_(std::move(done)),
      connected_(false) {}

bool HandshakeSession::start(Duration timeout) {
  // The first message may have arrived already. If it is refused, the peer costs neither a timer nor a watch.
  if (!opener_ && !onReady()) return false;
  deadline_ = shared_.loop.after(
      timeout, [this] { failForNow(connected_ ? "it did not finish the handshake in time" : "it cannot be reached"); });
  if (opener_ && !(socket_ = address_.socket())) return failWith(errno);
  try {
    watch_ = shared_.loop.watch(socket_.get(), [this](EventLoop::Ready) { connected_ ? onReady() : onConnected(); });
  } catch (const Error& error) {
    return failForNow(error.text());
  }
  if (opener_) return connect();
  watch_.setInterest(true, false);
  return true;
}

// ---- the opener ----

bool HandshakeSession::connect() {
  const int error = address_.connect(socket_.get());
  if (error == 0) return onConnected();
  if (error == EINPROGRESS) {
    watch_.setInterest(false, true);
  } else if (error == EAGAIN) {
    retry_ = shared_.loop.after(kBacklogRetryDelay, [this] { connect(); });
  } else {
    return failWith(error);
  }
  return true;
}

bool HandshakeSession::onConnected() {
  if (const int error = socketError(socket_.get()); error != 0) return failWith(error);
  connected_ = true;
  if (address_.isTcp()) tuneTcp(socket_.get());
  auto hello = self_;
  if (hasSecret()) hello.nonce = secureRandomBytes(kNonceBytes);
  if (!sendMessage(hello)) return false;
  watch_.setInterest(true, false);
  return true;
}

bool HandshakeSession::receiveChallenge(const HandshakeMessage& challenge) {
  if (!hasSecret()) return fail(ErrorCode::kProtocol, secretMismatchText(challenge.name, self_.name));
  if (challenge.nonce.size() != kNonceBytes) return fail(ErrorCode::kProtocol, "a malformed CHALLENGE");
  challenged_ = true;
  transcript_ += challenge.bytes();
  HandshakeMessage answer{.type = HandshakeType::kAnswer};
  answer.proof = prove(shared_.secret, Prover::kOpener, transcript_ + withoutProof(answer));
  return sendMessage(answer);
}

bool HandshakeSession::receiveWelcome(const HandshakeMessage& welcome) {
  if (hasSecret() && !challenged_) return fail(ErrorCode::kProtocol, secretMismatchText(self_.name, welcome.name));
  if (hasSecret() &&
      !isValidProof(welcome.proof, shared_.secret, Prover::kListener, transcript_ + withoutProof(welcome))) {
    return fail(ErrorCode::kProtocol, "it does not know the secret of the group of " + self_.name + kRemedy);
  }
  const bool shares = welcome.flags & HandshakeMessage::kSharedMemory;
  if (shares == static_cast<bool>(memory_)) return succeed(welcome);
  return fail(ErrorCode::kProtocol, "its shared memory did not come with its WELCOME");
}

// ---- both ----

bool HandshakeSession::onReady() {
  try {
    if (!readMessage()) return true;
    return onMessage(parseHandshake(prefix_.type, std::string_view(received_).substr(kHandshakePrefixBytes)));
  } catch (const Error& error) {
    return error.code() == ErrorCode::kWorkerLost ? failForNow(error.text()) : fail(error.code(), error.text());
  }
}

bool HandshakeSession::readMessage() {
  for (;;) {
    const size_t have = received_.size();
    received_.resize(wanted_bytes_);
    const auto received =
        receive(socket_.get(), received_.data() + have, wanted_bytes_ - have, opener_ ? &memory_ : nullptr);
    const int error = errno;
    received_.resize(have + static_cast<size_t>(std::max<ssize_t>(received, 0)));
    if (received < 0 && (error == EAGAIN || error == EINTR)) return false;
    if (received <= 0) throw Error(ErrorCode::kWorkerLost, socketErrorText(received == 0 ? ECONNRESET : error));
    if (received_.size() < wanted_bytes_) continue;
    if (wanted_bytes_ > kHandshakePrefixBytes) return true;
    prefix_ = HandshakePrefix::parse(received_);
    if (prefix_.body_bytes == 0) return true;
    wanted_bytes_ += prefix_.body_bytes;
  }
}

bool HandshakeSession::onMessage(const HandshakeMessage& message) {
  const auto is = [&](HandshakeType type, bool opener, bool challenged) {
    return message.type == type && opener_ == opener && challenged_ == challenged;
  };
  if (opener_ && message.type == HandshakeType::kWelcome) return receiveWelcome(message);
  if (opener_ && message.type == HandshakeType::kRefusal) {
    return fail(ErrorCode::kProtocol, "it refused the connection: " + message.text);
  }
  if (is(HandshakeType::kHello, false, false)) return receiveHello(message);
  if (is(HandshakeType::kAnswer, false, true)) return receiveAnswer(message);
  if (is(HandshakeType::kChallenge, true, false)) return receiveChallenge(message);
  return fail(ErrorCode::kProtocol, "a handshake message that is not for this side, or is out of order");
}

bool HandshakeSession::sendMessage(const HandshakeMessage& message, int descriptor) {
  const auto bytes = message.bytes();
  if (hasSecret()) transcript_ += bytes;
  received_.clear();
  wanted_bytes_ = kHandshakePrefixBytes;
  const int error = sendSmall(socket_.get(), bytes, descriptor);
  return error == 0 || failWith(error);
}

std::string HandshakeSession::secretMismatchText(const std::string& worker_with, const std::string& worker_without) {
  return "worker " + worker_with + " is in a group with a secret, worker " + worker_without + " knows of none" +
      kRemedy;
}

// ---- the listener ----

bool HandshakeSession::receiveHello(const HandshakeMessage& hello) {
  if (hello.listener != self_.listener) {
    return fail(ErrorCode::kProtocol, "another worker than the one wanted listens here now: " + self_.name);
  }
  if (hello.group != self_.group) {
    return fail(ErrorCode::kProtocol, "worker " + self_.name + " is in another group than " + hello.name);
  }
  if (hello.nonce.empty() == hasSecret()) {
    return fail(
        ErrorCode::kProtocol,
        hasSecret() ? secretMismatchText(self_.name, hello.name) : secretMismatchText(hello.name, self_.name));
  }
  hello_ = hello;
  has_greeted_ = true;
  if (!hasSecret()) return sendWelcome();
  if (hello.nonce.size() != kNonceBytes) return fail(ErrorCode::kProtocol, "a malformed HELLO");
  challenged_ = true;
  transcript_ = hello.bytes();
  return sendMessage({.type = HandshakeType::kChallenge, .name = self_.name, .nonce = secureRandomBytes(kNonceBytes)});
}

bool HandshakeSession::receiveAnswer(const HandshakeMessage& answer) {
  if (!isValidProof(answer.proof, shared_.secret, Prover::kOpener, transcript_ + withoutProof(answer))) {
    return fail(ErrorCode::kProtocol, "worker " + hello_.name + " does not know the secret of " + self_.name + kRemedy);
  }
  transcript_ += answer.bytes();
  return sendWelcome();
}

bool HandshakeSession::sendWelcome() {
  Descriptor memory;
  if ((hello_.flags & self_.flags & HandshakeMessage::kSharedMemory) && make_memory_) memory = make_memory_();
  HandshakeMessage welcome{.type = HandshakeType::kWelcome, .name = self_.name};
  if (memory) welcome.flags |= HandshakeMessage::kSharedMemory;
  if (hasSecret()) welcome.proof = prove(shared_.secret, Prover::kListener, transcript_ + withoutProof(welcome));
  if (!sendMessage(welcome, memory.get())) return false;
  memory_ = std::move(memory);
  return succeed(hello_);
}

// ---- the end ----

bool HandshakeSession::fail(ErrorCode code, const std::string& text) {
  if (!opener_) ++shared_.refused;
  // Only a peer that speaks this protocol gets a REFUSAL.
  if (!opener_ && code == ErrorCode::kProtocol && HandshakePrefix::isOurs(received_)) {
    sendSmall(socket_.get(), HandshakeMessage{.type = HandshakeType::kRefusal, .text = text}.bytes());
  }
  watch_ = {};
  std::exchange(done_, nullptr)(Error(code, text));
  return false;
}

bool HandshakeSession::failForNow(const std::string& text) {
  may_retry_ = true;
  return fail(ErrorCode::kWorkerLost, text);
}

bool HandshakeSession::failWith(int error) {
  constexpr int kForNow[] = {EMFILE, ENFILE,    ENOBUFS,  ENOMEM,      EAGAIN,    ECONNRESET,
                             EPIPE,  ETIMEDOUT, ENETDOWN, ENETUNREACH, EHOSTDOWN, EHOSTUNREACH};
  if (std::ranges::find(kForNow, error) != std::end(kForNow)) return failForNow(socketErrorText(error));
  return fail(ErrorCode::kWorkerLost, socketErrorText(error));
}

bool HandshakeSession::succeed(const HandshakeMessage& peer) {
  watch_ = {};
  std::exchange(done_, nullptr)(AuthenticatedPeer{std::move(socket_), peer, std::move(memory_)});
  return false;
}

}  // namespace torchrpc::native
