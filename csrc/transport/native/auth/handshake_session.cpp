#include "transport/native/auth/handshake_session.h"

#include <cerrno>

#include "base/random.h"
#include "transport/native/auth/proof.h"

namespace torchrpc::native {

namespace {
// A Unix socket whose listener is busy with many others says so at once, where TCP would wait.
constexpr auto kBusyPause = std::chrono::milliseconds(2);

const std::string kRemedy =
    ": give all workers of the group the same secret (TORCHRPC_SECRET_FILE, TORCHRPC_SECRET or the option secret), or "
    "give none and let it come through the store";

/// What a proof is of, for the greeting that brings the proof.
std::string withoutProof(HandshakeMessage greeting) {
  greeting.proof.clear();
  return greeting.bytes();
}
}  // namespace

HandshakeSession::HandshakeSession(
    SharedState& shared, Descriptor accepted, HandshakeMessage self, MemoryMaker make_memory, Done done)
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

bool HandshakeSession::start(Duration deadline) {
  // What it says may be here already: then nothing else is made for who is a stranger.
  if (!opener_ && !onReady()) return false;
  deadline_ = shared_.loop.after(deadline, [this] {
    fail(ErrorCode::kWorkerLost, connected_ ? "it did not finish the handshake in time" : "it cannot be reached");
  });
  if (opener_ && !(socket_ = address_.socket())) return fail(ErrorCode::kWorkerLost, socketErrorText(errno));
  try {
    watch_ = shared_.loop.watch(socket_.get(), [this](EventLoop::Ready) { connected_ ? onReady() : onConnected(); });
  } catch (const Error& error) {
    return fail(error.code(), error.text());
  }
  if (opener_) return connect();
  watch_.want(true, false);
  return true;
}

// ---- the opener ----

bool HandshakeSession::connect() {
  const int error = address_.connect(socket_.get());
  if (error == 0) return onConnected();
  if (error == EINPROGRESS) {
    watch_.want(false, true);
  } else if (error == EAGAIN) {
    retry_ = shared_.loop.after(kBusyPause, [this] { connect(); });
  } else {
    return fail(ErrorCode::kWorkerLost, socketErrorText(error));
  }
  return true;
}

bool HandshakeSession::onConnected() {
  if (const int error = socketError(socket_.get()); error != 0) {
    return fail(ErrorCode::kWorkerLost, socketErrorText(error));
  }
  connected_ = true;
  if (address_.isTcp()) tuneTcp(socket_.get());
  auto hello = self_;
  if (hasSecret()) hello.nonce = secureRandomBytes(kNonceBytes);
  if (!say(hello)) return false;
  watch_.want(true, false);
  return true;
}

bool HandshakeSession::receiveChallenge(const HandshakeMessage& challenge) {
  if (!hasSecret()) return fail(ErrorCode::kProtocol, unlikeSecrets(challenge.name, self_.name));
  if (challenge.nonce.size() != kNonceBytes) return fail(ErrorCode::kProtocol, "a malformed challenge");
  challenged_ = true;
  transcript_ += challenge.bytes();
  HandshakeMessage answer{.type = HandshakeType::kAnswer};
  answer.proof = prove(shared_.secret, Prover::kOpener, transcript_ + withoutProof(answer));
  return say(answer);
}

bool HandshakeSession::receiveWelcome(const HandshakeMessage& welcome) {
  if (hasSecret() && !challenged_) return fail(ErrorCode::kProtocol, unlikeSecrets(self_.name, welcome.name));
  if (hasSecret() && !isProof(welcome.proof, shared_.secret, Prover::kListener, transcript_ + withoutProof(welcome))) {
    return fail(ErrorCode::kProtocol, "it does not know the secret of the group of " + self_.name + kRemedy);
  }
  const bool shares = welcome.flags & HandshakeMessage::kSharedMemory;
  if (shares == static_cast<bool>(memory_)) return succeed(welcome);
  return fail(ErrorCode::kProtocol, "its shared memory did not come with its greeting");
}

// ---- both ----

bool HandshakeSession::onReady() {
  try {
    if (!readMessage()) return true;
    return onMessage(parseHandshake(prefix_.type, std::string_view(bytes_).substr(kHandshakePrefixBytes)));
  } catch (const Error& malformed) {
    return fail(malformed.code(), malformed.text());
  }
}

bool HandshakeSession::readMessage() {
  for (;;) {
    const size_t have = bytes_.size();
    bytes_.resize(wanted_);
    const auto received = receive(socket_.get(), bytes_.data() + have, wanted_ - have, opener_ ? &memory_ : nullptr);
    const int error = errno;
    bytes_.resize(have + static_cast<size_t>(std::max<ssize_t>(received, 0)));
    if (received < 0 && (error == EAGAIN || error == EINTR)) return false;
    if (received <= 0) throw Error(ErrorCode::kWorkerLost, socketErrorText(received == 0 ? ECONNRESET : error));
    if (bytes_.size() < wanted_) continue;
    if (wanted_ > kHandshakePrefixBytes) return true;
    prefix_ = HandshakePrefix::parse(bytes_);
    if (prefix_.body_bytes == 0) return true;
    wanted_ += prefix_.body_bytes;
  }
}

bool HandshakeSession::onMessage(const HandshakeMessage& greeting) {
  const auto is = [&](HandshakeType type, bool opener, bool challenged) {
    return greeting.type == type && opener_ == opener && challenged_ == challenged;
  };
  if (opener_ && greeting.type == HandshakeType::kWelcome) return receiveWelcome(greeting);
  if (opener_ && greeting.type == HandshakeType::kRefusal) {
    return fail(ErrorCode::kProtocol, "it refuses us: " + greeting.text);
  }
  if (is(HandshakeType::kHello, false, false)) return receiveHello(greeting);
  if (is(HandshakeType::kAnswer, false, true)) return receiveAnswer(greeting);
  if (is(HandshakeType::kChallenge, true, false)) return receiveChallenge(greeting);
  return fail(ErrorCode::kProtocol, "a greeting that is not for this side, or not in its turn");
}

bool HandshakeSession::say(const HandshakeMessage& greeting, int descriptor) {
  const auto bytes = greeting.bytes();
  if (hasSecret()) transcript_ += bytes;
  bytes_.clear();
  wanted_ = kHandshakePrefixBytes;
  const int error = sendSmall(socket_.get(), bytes, descriptor);
  return error == 0 || fail(ErrorCode::kWorkerLost, socketErrorText(error));
}

std::string HandshakeSession::unlikeSecrets(const std::string& with, const std::string& without) {
  return "worker " + with + " is in a group with a secret, worker " + without + " knows of none" + kRemedy;
}

// ---- the side that listens ----

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
        hasSecret() ? unlikeSecrets(self_.name, hello.name) : unlikeSecrets(hello.name, self_.name));
  }
  hello_ = hello;
  if (!hasSecret()) return welcome();
  if (hello.nonce.size() != kNonceBytes) return fail(ErrorCode::kProtocol, "a malformed greeting");
  challenged_ = true;
  transcript_ = hello.bytes();
  return say({.type = HandshakeType::kChallenge, .name = self_.name, .nonce = secureRandomBytes(kNonceBytes)});
}

bool HandshakeSession::receiveAnswer(const HandshakeMessage& answer) {
  if (!isProof(answer.proof, shared_.secret, Prover::kOpener, transcript_ + withoutProof(answer))) {
    return fail(ErrorCode::kProtocol, "worker " + hello_.name + " does not know the secret of " + self_.name + kRemedy);
  }
  transcript_ += answer.bytes();
  return welcome();
}

bool HandshakeSession::welcome() {
  Descriptor memory;
  if ((hello_.flags & self_.flags & HandshakeMessage::kSharedMemory) && make_memory_) memory = make_memory_();
  HandshakeMessage welcome{.type = HandshakeType::kWelcome, .name = self_.name};
  if (memory) welcome.flags |= HandshakeMessage::kSharedMemory;
  if (hasSecret()) welcome.proof = prove(shared_.secret, Prover::kListener, transcript_ + withoutProof(welcome));
  if (!say(welcome, memory.get())) return false;
  memory_ = std::move(memory);
  return succeed(hello_);
}

// ---- the end ----

bool HandshakeSession::fail(ErrorCode code, const std::string& text) {
  if (!opener_) ++shared_.refused;
  // Only those who speak our language get an answer.
  if (!opener_ && code == ErrorCode::kProtocol && HandshakePrefix::isOurs(bytes_)) {
    sendSmall(socket_.get(), HandshakeMessage{.type = HandshakeType::kRefusal, .text = text}.bytes());
  }
  watch_ = {};
  std::exchange(done_, nullptr)(Error(code, text));
  return false;
}

bool HandshakeSession::succeed(const HandshakeMessage& peer) {
  watch_ = {};
  std::exchange(done_, nullptr)(AuthenticatedPeer{std::move(socket_), peer, std::move(memory_)});
  return false;
}

}  // namespace torchrpc::native
