#include "transport/native_greeter.h"

#include <cerrno>

namespace torchrpc {

namespace {
// A Unix socket whose listener is busy with many others says so at once, where TCP would wait.
constexpr auto kBusyPause = std::chrono::milliseconds(2);
}  // namespace

NativeGreeter::NativeGreeter(
    NativeShared& shared, Descriptor accepted, Greeting self, MemoryMaker make_memory, Done done)
    : shared_(shared),
      opener_(false),
      self_(std::move(self)),
      make_memory_(std::move(make_memory)),
      done_(std::move(done)),
      socket_(std::move(accepted)),
      connected_(true) {}

NativeGreeter::NativeGreeter(NativeShared& shared, SocketAddress address, Greeting hello, Done done)
    : shared_(shared),
      opener_(true),
      address_(address),
      self_(std::move(hello)),
      done_(std::move(done)),
      connected_(false) {}

void NativeGreeter::start(Duration deadline) {
  deadline_ = shared_.loop.after(deadline, [this] {
    fail(ErrorCode::kWorkerLost, connected_ ? "it did not finish the handshake in time" : "it cannot be reached");
  });
  if (opener_ && !(socket_ = address_.socket())) return fail(ErrorCode::kWorkerLost, socketErrorText(errno));
  try {
    watch_ = shared_.loop.watch(socket_.get(), [this](NativeLoop::Ready) { connected_ ? onReady() : onConnected(); });
  } catch (const Error& error) {
    return fail(error.code(), error.text());
  }
  if (opener_) return connect();
  watch_.want(true, false);
}

// ---- the opener ----

void NativeGreeter::connect() {
  const int error = address_.connect(socket_.get());
  if (error == 0) return onConnected();
  if (error == EINPROGRESS) return watch_.want(false, true);
  if (error != EAGAIN) return fail(ErrorCode::kWorkerLost, socketErrorText(error));
  retry_ = shared_.loop.after(kBusyPause, [this] { connect(); });
}

void NativeGreeter::onConnected() {
  int error = socketError(socket_.get());
  if (error == 0) {
    connected_ = true;
    if (address_.isTcp()) tuneTcp(socket_.get());
    error = sendSmall(socket_.get(), self_.bytes());
  }
  if (error != 0) return fail(ErrorCode::kWorkerLost, socketErrorText(error));
  watch_.want(true, false);
}

// ---- both ----

void NativeGreeter::onReady() {
  // Reads no further than the greeting: what follows is not ours.
  for (;;) {
    const size_t have = bytes_.size();
    bytes_.resize(wanted_);
    const auto received = receive(socket_.get(), bytes_.data() + have, wanted_ - have, opener_ ? &memory_ : nullptr);
    const int error = errno;
    bytes_.resize(have + static_cast<size_t>(std::max<ssize_t>(received, 0)));
    if (received < 0 && (error == EAGAIN || error == EINTR)) return;
    if (received <= 0) return fail(ErrorCode::kWorkerLost, socketErrorText(received == 0 ? ECONNRESET : error));
    if (bytes_.size() < wanted_) continue;
    try {
      if (wanted_ == kGreetingPrefixBytes) {
        prefix_ = GreetingPrefix::parse(bytes_);
        wanted_ += prefix_.body_bytes;
        if (wanted_ > kGreetingPrefixBytes) continue;
      }
      return onGreeting(parseGreeting(prefix_.type, std::string_view(bytes_).substr(kGreetingPrefixBytes)));
    } catch (const Error& malformed) {
      return fail(malformed.code(), malformed.text());
    }
  }
}

void NativeGreeter::onGreeting(const Greeting& greeting) {
  if (!opener_ && greeting.type == GreetingType::kHello) return receiveHello(greeting);
  if (opener_ && greeting.type == GreetingType::kWelcome) {
    const bool shares = greeting.flags & Greeting::kSharedMemory;
    if (shares == static_cast<bool>(memory_)) return succeed(greeting);
    return fail(ErrorCode::kProtocol, "its shared memory did not come with its greeting");
  }
  if (opener_ && greeting.type == GreetingType::kRefusal) {
    return fail(ErrorCode::kProtocol, "it refuses us: " + greeting.text);
  }
  fail(ErrorCode::kProtocol, "a greeting that is not for this side");
}

// ---- the side that listens ----

void NativeGreeter::receiveHello(const Greeting& hello) {
  if (hello.listener != self_.listener) {
    return fail(ErrorCode::kProtocol, "another worker than the one wanted listens here now: " + self_.name);
  }
  if (hello.group != self_.group) {
    return fail(ErrorCode::kProtocol, "worker " + self_.name + " is in another group than " + hello.name);
  }
  if (!hello.proof.empty()) {
    return fail(ErrorCode::kProtocol, "worker " + self_.name + " knows of no secret");
  }
  Descriptor memory;
  if ((hello.flags & self_.flags & Greeting::kSharedMemory) && make_memory_) memory = make_memory_();
  Greeting welcome{.type = GreetingType::kWelcome, .name = self_.name};
  if (memory) welcome.flags |= Greeting::kSharedMemory;
  if (const int error = sendSmall(socket_.get(), welcome.bytes(), memory.get()); error != 0) {
    return fail(ErrorCode::kWorkerLost, socketErrorText(error));
  }
  memory_ = std::move(memory);
  succeed(hello);
}

// ---- the end ----

void NativeGreeter::fail(ErrorCode code, const std::string& text) {
  if (!opener_) ++shared_.refused;
  // Only those who speak our language get an answer.
  if (!opener_ && code == ErrorCode::kProtocol && GreetingPrefix::isOurs(bytes_)) {
    sendSmall(socket_.get(), Greeting{.type = GreetingType::kRefusal, .text = text}.bytes());
  }
  watch_ = {};
  std::exchange(done_, nullptr)(Error(code, text));
}

void NativeGreeter::succeed(const Greeting& peer) {
  watch_ = {};
  std::exchange(done_, nullptr)(Met{std::move(socket_), peer, std::move(memory_)});
}

}  // namespace torchrpc
