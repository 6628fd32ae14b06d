#include "transport/native/auth/handshake_session.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <unistd.h>

#include "base/log.h"
#include "base/os/sockets.h"
#include "transport/native/auth/identity.h"

namespace torchrpc::native {

namespace {
// connect() to a Unix socket fails at once (EAGAIN) if the listener's backlog is full. TCP would wait instead.
constexpr auto kBacklogRetryDelay = std::chrono::milliseconds(2);

const std::string kRemedy =
    ": give all workers of the group the same secret (TORCHRPC_SECRET_FILE, TORCHRPC_SECRET or the option secret), or "
    "give none and let it come through the store";
const std::string kNotAuthentic =
    " does not know the secret of this group, or its messages were relayed or changed on the way" + kRemedy;
const std::string kOtherUser =
    "the socket is owned by another user: workers of one host that use Unix sockets belong to one user; use "
    "transport='tcp' (TORCHRPC_TRANSPORT=tcp) on all workers";

const std::string kTlsRemedy =
    ": give all workers of the group a TLS certificate (TORCHRPC_TLS_CERTIFICATE or the option tls), or "
    "give it to none";

/// Whether the bytes begin a record of a TLS handshake.
bool areOfTls(std::string_view bytes) { return bytes.starts_with("\x16\x03"); }

/// Discards received bytes. Otherwise the close of a socket with unread bytes would also discard the bytes sent last.
void discardReceived(int fd) {
  std::array<char, 4096> bytes;
  for (int i = 0; i < 16 && ::recv(fd, bytes.data(), bytes.size(), 0) > 0; ++i) {
  }
}

/// Whether the process at the other end of a Unix socket has the user id of this one.
bool isOfSameUser(int fd) { return os::peerUserId(fd) == ::geteuid(); }
}  // namespace

HandshakeSession::HandshakeSession(
    SharedState& shared, Descriptor accepted, Terms terms, MemoryFactory make_memory, Admission admission, Done done)
    : shared_(shared),
      side_(Side::kListener),
      terms_(std::move(terms)),
      make_memory_(std::move(make_memory)),
      admission_(std::move(admission)),
      done_(std::move(done)),
      socket_(std::move(accepted)),
      connected_(true),
      expected_(HandshakeType::kHello) {}

HandshakeSession::HandshakeSession(SharedState& shared, SocketAddress address, Terms terms, Done done)
    : shared_(shared),
      side_(Side::kOpener),
      address_(address),
      terms_(std::move(terms)),
      done_(std::move(done)),
      connected_(false),
      expected_(HandshakeType::kWelcome) {}

bool HandshakeSession::start(Duration timeout) {
  // The first message may have arrived already. If it is refused, the session needs neither a timer nor a watch.
  const bool is_opener = side_ == Side::kOpener;
  if (!is_opener && !onReady()) return false;
  deadline_ = shared_.loop.after(timeout, [this] { onDeadline(); });
  if (is_opener && !(socket_ = address_.socket())) return failWith(errno);
  try {
    watch_ = shared_.loop.watch(socket_.get(), [this](EventLoop::Ready) { connected_ ? onReady() : onConnected(); });
  } catch (const Error& error) {
    return failForNow(error.text());
  }
  if (is_opener) return connect();
  watch_.setInterest(true, false);
  return true;
}

void HandshakeSession::onDeadline() {
  if (!connected_) return static_cast<void>(failForNow("it cannot be reached"));
  // If this process itself was stopped (SIGSTOP), the message may have arrived without being read.
  if (!onReady()) return;
  const std::string late = "it did not finish the handshake in time";
  side_ == Side::kListener ? fail(ErrorCode::kTimeout, late) : failForNow(late);
}

// ---- both ----

bool HandshakeSession::onReady() {
  try {
    if (shared_.options.tls && !continueTls()) return true;
    if (side_ == Side::kOpener && !has_greeted_ && !peer_has_no_tls_) return sendHello();
    if (!readMessage()) return true;
    const auto body = std::string_view(received_).substr(kHandshakePrefixBytes);
    if (shared_.options.tls && !tls_ && prefix_.type != HandshakeType::kRefusal) {
      return fail(ErrorCode::kProtocol, "only one of the two workers uses TLS" + kTlsRemedy);
    }
    return onMessage(parseHandshake(prefix_.type, body));
  } catch (const Error& error) {
    return error.code() == ErrorCode::kWorkerLost ? failForNow(error.text()) : fail(error.code(), error.text());
  }
}

bool HandshakeSession::continueTls() {
  if (peer_has_no_tls_ || (tls_ && tls_->isEstablished())) return true;
  std::array<char, kHandshakePrefixBytes> first;
  const auto bytes = ::recv(socket_.get(), first.data(), first.size(), MSG_PEEK);
  if (bytes > 0 && HandshakePrefix::isOurs({first.data(), static_cast<size_t>(bytes)})) {
    // The peer does not use TLS. It refuses this connection, or this side will refuse it, in clear text.
    peer_has_no_tls_ = true;
    tls_.reset();
    return true;
  }
  if (!tls_) {
    // No memory for TLS is allocated before the peer has sent something.
    if (side_ == Side::kListener && bytes < 0) return false;
    tls_ = std::make_unique<TlsSession>(*shared_.options.tls, socket_.get(), side_);
  }
  try {
    const bool is_complete = tls_->handshake().take();
    if (const int error = tls_->flush()) throw Error(ErrorCode::kWorkerLost, socketErrorText(error));
    return is_complete;
  } catch (const Error& error) {
    static LogOnce once;
    if (side_ == Side::kListener && error.code() == ErrorCode::kProtocol) {
      once.log(LogLevel::kWarning, "a connection was refused: " + error.text());
    }
    throw;
  }
}

ssize_t HandshakeSession::receiveSome(std::span<char> room, Descriptor* descriptor) {
  if (!tls_) return receive(socket_.get(), room.data(), room.size(), descriptor);
  const auto bytes = tls_->read(room, descriptor).take();
  if (bytes > 0) return static_cast<ssize_t>(bytes);
  errno = EAGAIN;
  return -1;
}

int HandshakeSession::send(const std::string& bytes, int descriptor) {
  if (!tls_) return sendSmall(socket_.get(), bytes, descriptor);
  return tls_->seal(bytes) ? tls_->flush(descriptor) : EIO;
}

bool HandshakeSession::readMessage() {
  const auto memory = expected_ == HandshakeType::kReady ? &memory_ : nullptr;
  for (;;) {
    const size_t have = received_.size();
    received_.resize(wanted_bytes_);
    const auto received = receiveSome(std::span(received_).subspan(have), memory);
    const int error = errno;
    received_.resize(have + static_cast<size_t>(std::max<ssize_t>(received, 0)));
    if (received < 0 && (error == EAGAIN || error == EINTR)) return false;
    if (received <= 0) throw Error(ErrorCode::kWorkerLost, socketErrorText(received == 0 ? ECONNRESET : error));
    if (received_.size() < wanted_bytes_) continue;
    if (wanted_bytes_ > kHandshakePrefixBytes) return true;
    if (areOfTls(received_)) throw Error(ErrorCode::kProtocol, "only one of the two workers uses TLS" + kTlsRemedy);
    prefix_ = HandshakePrefix::parse(received_);
    if (prefix_.body_bytes == 0) return true;
    wanted_bytes_ += prefix_.body_bytes;
  }
}

bool HandshakeSession::onMessage(const HandshakeMessage& message) {
  if (side_ == Side::kOpener && message.type == HandshakeType::kRefusal) {
    return fail(ErrorCode::kProtocol, "it refused the connection: " + message.text);
  }
  if (message.type != expected_) {
    return fail(ErrorCode::kProtocol, "a handshake message that is not for this side, or is out of order");
  }
  switch (message.type) {
    case HandshakeType::kHello: return receiveHello(message);
    case HandshakeType::kWelcome: return receiveWelcome(message);
    case HandshakeType::kConfirm: return receiveConfirm(message);
    default: return receiveReady(message);
  }
}

bool HandshakeSession::sendMessage(
    HandshakeMessage message, const HandshakePayload& payload, std::string tokens, int descriptor) {
  message.payload = noise_ ? std::move(tokens) + noise_->sealPayload(payload.bytes()) : payload.bytes();
  received_.clear();
  wanted_bytes_ = kHandshakePrefixBytes;
  const int error = send(message.bytes(), descriptor);
  return error == 0 || failWith(error);
}

HandshakePayload HandshakeSession::openPayload(std::string_view sealed) {
  if (!noise_) return HandshakePayload::parse(sealed);
  if (const auto payload = noise_->openPayload(sealed)) return HandshakePayload::parse(*payload);
  // The listener's text is also sent to the opener, in the REFUSAL.
  throw Error(ErrorCode::kProtocol, (side_ == Side::kListener ? "the worker that connects" : "it") + kNotAuthentic);
}

void HandshakeSession::startNoise(HandshakeMessage hello) {
  // The prologue covers everything in HELLO that is sent in clear text, the kind of socket, and the TLS session. So a
  // HELLO that was changed, or relayed to a socket of another kind, is not authentic. Everything else that the two
  // sides agree on is in the sealed payloads.
  hello.payload.clear();
  const auto binding = tls_ ? tls_->channelBinding() : "";
  noise_.emplace(side_, shared_.key, hello.bytes() + (terms_.is_tcp ? "tcp" : "unix") + binding);
}

void HandshakeSession::checkIdentity(const HandshakePayload& payload, std::string_view handshake_hash) {
  if (tls_) identity_ = tls_->identify(peer_name_);
  if (const auto& own = shared_.options.identity) {
    identity_ = own->check(payload.identity, peerSide(), handshake_hash, peer_name_);
  }
}

std::string HandshakeSession::makeIdentity() const {
  const auto& own = shared_.options.identity;
  return own ? own->prove(side_, noise_->hash()) : "";
}

std::string HandshakeSession::encryptionMismatchText(bool peer_encrypts, const HandshakePayload& peer) const {
  const auto describe = [](const std::string& name, bool encrypts, const std::string& setting) {
    return "worker " + name + (encrypts ? " encrypts its connections over TCP" : " does not encrypt") +
        " (encryption='" + setting + "')";
  };
  const auto& options = shared_.options;
  return describe(peer_name_, peer_encrypts, peer.encryption) + ", " +
      describe(options.node_name, encrypts(), options.encryption) +
      ": give all workers of the group the same option encryption or TORCHRPC_ENCRYPTION, and the same secret";
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
  if (terms_.is_tcp) {
    tuneTcp(socket_.get());
  } else if (!isOfSameUser(socket_.get())) {
    return fail(ErrorCode::kProtocol, kOtherUser);
  }
  watch_.setInterest(true, false);
  return onReady();
}

bool HandshakeSession::sendHello() {
  has_greeted_ = true;
  HandshakeMessage hello{.listener = terms_.listener, .group = shared_.options.group};
  if (terms_.shares_memory) hello.flags |= HandshakeMessage::kSharedMemory;
  if (hasSecret()) hello.flags |= HandshakeMessage::kSecret;
  if (encrypts()) hello.flags |= HandshakeMessage::kEncrypted;
  if (usesAes()) hello.flags |= HandshakeMessage::kAes;
  std::string tokens;
  if (hasSecret()) {
    startNoise(hello);
    tokens = noise_->writeTokens();
  }
  const auto& options = shared_.options;
  const HandshakePayload payload{.name = options.node_name, .encryption = options.encryption};
  return sendMessage(std::move(hello), payload, std::move(tokens));
}

bool HandshakeSession::receiveWelcome(const HandshakeMessage& welcome) {
  std::string_view sealed = welcome.payload;
  if (noise_) noise_->readTokens(sealed);
  const std::string hash(noise_ ? noise_->hash() : "");
  const auto payload = openPayload(sealed);
  peer_name_ = payload.name;
  chosen_ = payload.flags;
  const bool is_encrypted = chosen_ & HandshakeMessage::kEncrypted;
  if (is_encrypted != encrypts()) {
    return fail(ErrorCode::kProtocol, encryptionMismatchText(is_encrypted, payload));
  }
  if ((chosen_ & HandshakeMessage::kAes) && !usesAes()) {
    return fail(ErrorCode::kProtocol, "it chose a cipher that was not offered");
  }
  if ((hasSecret() || tls_) && peer_name_ != terms_.expected_name) {
    return fail(
        ErrorCode::kProtocol,
        "worker " + peer_name_ + " listens there, not " + terms_.expected_name +
            ": its address was changed on the way");
  }
  checkIdentity(payload, hash);
  expected_ = HandshakeType::kReady;
  return sendMessage({.type = HandshakeType::kConfirm}, {.identity = makeIdentity()}, {});
}

bool HandshakeSession::receiveReady(const HandshakeMessage& ready) {
  const bool shares = openPayload(ready.payload).flags & HandshakeMessage::kSharedMemory;
  if (shares == static_cast<bool>(memory_) && (!shares || terms_.shares_memory)) return succeed();
  return fail(ErrorCode::kProtocol, "its shared memory did not come with its READY");
}

// ---- the listener ----

bool HandshakeSession::receiveHello(const HandshakeMessage& hello) {
  // An unauthenticated peer learns only that this worker is not the one that it is looking for.
  if (!terms_.is_tcp && !isOfSameUser(socket_.get())) return fail(ErrorCode::kProtocol, kOtherUser);
  if (hello.listener != terms_.listener) {
    return fail(ErrorCode::kProtocol, "another worker than the one wanted listens here now");
  }
  if (hello.group != shared_.options.group) {
    return fail(ErrorCode::kProtocol, "the worker that listens here is in another group");
  }
  const bool peer_has_secret = hello.flags & HandshakeMessage::kSecret;
  if (peer_has_secret != hasSecret()) {
    const std::string listener = "the worker that listens here", opener = "the one that connects";
    return fail(
        ErrorCode::kProtocol,
        (hasSecret() ? listener : opener) + " is in a group with a secret, " + (hasSecret() ? opener : listener) +
            " knows of none" + kRemedy);
  }
  std::string_view sealed = hello.payload;
  if (hasSecret()) {
    startNoise(hello);
    noise_->readTokens(sealed);
  }
  const auto payload = openPayload(sealed);
  if (noise_ && !shared_.seen_hellos.add(noise_->hash())) {
    return fail(ErrorCode::kProtocol, "the worker that connects has sent a copy of an earlier HELLO");
  }
  has_greeted_ = true;
  peer_name_ = payload.name;
  peer_shares_memory_ = hello.flags & HandshakeMessage::kSharedMemory;
  const bool peer_encrypts = hello.flags & HandshakeMessage::kEncrypted;
  if (peer_encrypts != encrypts()) {
    const auto text = encryptionMismatchText(peer_encrypts, payload);
    static LogOnce once;
    once.log(LogLevel::kWarning, "a connection was refused: " + text);
    return fail(ErrorCode::kProtocol, text);
  }
  if (const auto reason = admission_(peer_name_)) return fail(ErrorCode::kProtocol, *reason);
  return sendWelcome(hello);
}

bool HandshakeSession::sendWelcome(const HandshakeMessage& hello) {
  const auto& options = shared_.options;
  if (encrypts()) chosen_ = HandshakeMessage::kEncrypted;
  if (usesAes()) chosen_ |= hello.flags & HandshakeMessage::kAes;
  std::string tokens;
  if (noise_) {
    ++shared_.key_exchanges;
    tokens = noise_->writeTokens();
  }
  expected_ = HandshakeType::kConfirm;
  return sendMessage(
      {.type = HandshakeType::kWelcome},
      {.flags = chosen_, .name = options.node_name, .encryption = options.encryption, .identity = makeIdentity()},
      std::move(tokens));
}

bool HandshakeSession::receiveConfirm(const HandshakeMessage& confirm) {
  const std::string hash(noise_ ? noise_->hash() : "");
  checkIdentity(openPayload(confirm.payload), hash);
  Descriptor memory;
  if (peer_shares_memory_ && terms_.shares_memory) memory = make_memory_();
  HandshakePayload payload;
  if (memory) payload.flags = HandshakeMessage::kSharedMemory;
  if (!sendMessage({.type = HandshakeType::kReady}, payload, {}, memory.get())) return false;
  memory_ = std::move(memory);
  return succeed();
}

// ---- the end ----

bool HandshakeSession::fail(ErrorCode code, const std::string& text) {
  const bool is_listener = side_ == Side::kListener;
  if (is_listener) ++shared_.refused;
  // Only a peer that speaks this protocol, or TLS, receives a REFUSAL.
  if (is_listener && code == ErrorCode::kProtocol && (HandshakePrefix::isOurs(received_) || areOfTls(received_))) {
    send(HandshakeMessage{.type = HandshakeType::kRefusal, .text = text}.bytes());
  } else if (tls_) {
    tls_->flush();  // sends the TLS alert, if there is one
    discardReceived(socket_.get());
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

bool HandshakeSession::succeed() {
  watch_ = {};
  AuthenticatedPeer peer{std::move(socket_), std::move(peer_name_), std::move(memory_), std::move(identity_)};
  if (encrypts()) {
    const auto cipher = chosen_ & HandshakeMessage::kAes ? Cipher::kAes256Gcm : Cipher::kChaCha20Poly1305;
    const auto key = [&](Side from) {
      const std::string_view side = from == Side::kOpener ? " from the opener" : " from the listener";
      return noise_->exportKey("torchrpc: " + std::string(nameOf(cipher)) + std::string(side));
    };
    peer.keys = RecordKeys{cipher, key(side_), key(peerSide())};
  }
  if (terms_.is_tcp) peer.tls = std::move(tls_);
  std::exchange(done_, nullptr)(std::move(peer));
  return false;
}

}  // namespace torchrpc::native
