// Only the transport owns the context and joins TensorPipe's threads, so none of these threads destroys the context.
// Connections and callbacks hold only TensorPipeShared and pipes, which any thread may destroy.
//
// Note [Listener failures]
// TensorPipe closes a listener when a peer dies during TensorPipe's handshake, or uses another protocol. Without a
// listener no peer can reach the node. Therefore the transport listens again, at the same addresses, as soon as the old
// sockets are closed. A separate thread waits for that, because the loop must not block. Peers that connect in these
// few milliseconds are refused.
// TensorPipe keeps the old listener while pipes that it has accepted are open, and with it the connections that it has
// accepted but not read: their peers wait for an answer that never comes. So each transport ends the connections that
// it opens if their handshake is not finished by a deadline.

#include "transport/tensorpipe/transport.h"

#include <tensorpipe/tensorpipe.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "base/doctor.h"
#include "base/executor/task_thread.h"
#include "base/log.h"
#include "base/timer.h"
#include "transport/host_address.h"
#include "transport/tensorpipe/address.h"
#include "transport/tensorpipe/backends.h"
#include "transport/tensorpipe/connection.h"

namespace torchrpc {

namespace {

// The name of a context, which the accepting side reads, is one of these prefixes followed by the name of the node. The
// prefix says whether the context has channels.
constexpr std::string_view kWithChannels = "channels:";
constexpr std::string_view kWithoutChannels = "payloads:";

class TensorPipeTransport : public Transport {
 public:
  explicit TensorPipeTransport(const TensorPipeOptions& options)
      : address_(chooseHostAddress({options.host, options.rendezvous_host})),
        transports_(makeTransports(options.transports)),
        channels_(makeChannels(options.channels, transports_, address_)),
        handshake_deadline_(options.handshake_deadline),
        shared_(std::make_shared<TensorPipeShared>(options.limits)),
        context_(tensorpipe::ContextOptions().name(
            std::string(channels_.empty() ? kWithoutChannels : kWithChannels) + options.node_name)) {
    // TensorPipe prefers the higher number.
    auto priority = static_cast<int64_t>(transports_.size() + channels_.size());
    for (const auto& [name, transport] : transports_) context_.registerTransport(priority--, name, transport);
    for (const auto& [name, channel] : channels_) context_.registerChannel(priority--, name, channel);
  }
  ~TensorPipeTransport() override { close(); }

  std::string listen(Acceptor acceptor) override;
  std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) override;
  void close() override;
  bool inLoop() const override { return LoopScope::in(shared_->callbacks); }
  std::string describe() const override {
    return "tensorpipe(" + namesOf(transports_) + (channels_.empty() ? "" : "; " + namesOf(channels_)) + ")";
  }

 private:
  void acceptNext();
  void onAccept(const tensorpipe::Error& error, const std::shared_ptr<tensorpipe::Pipe>& pipe) noexcept;
  void onListenerFailed(const tensorpipe::Error& error);
  void listenAgain();
  const TensorPipeAddress::Endpoint& chooseEndpoint(
      const TensorPipeAddress& address, const std::string& peer_name) const;

  // Constant after construction.
  const std::string address_;
  const std::vector<TransportBackend> transports_;
  const std::vector<ChannelBackend> channels_;
  const Duration handshake_deadline_;
  const std::shared_ptr<TensorPipeShared> shared_;

  // Have their own synchronization.
  const std::unique_ptr<Timer> timer_ = makeThreadTimer();
  tensorpipe::Context context_;
  std::once_flag close_once_;

  // Written by listen(), before the first callback that reads them.
  Acceptor acceptor_;
  std::vector<std::string> urls_;

  // Used by one thread at a time: by listen(), then by the accept callback, then by the task that this callback posts
  // to recovery_, then by the next accept callback, and so on.
  std::shared_ptr<tensorpipe::Listener> listener_;
  std::unique_ptr<TaskThread> recovery_;
};

std::string TensorPipeTransport::listen(Acceptor acceptor) {
  // TensorPipe terminates the process if it cannot bind.
  checkCanListen(address_);
  std::vector<std::string> urls;
  for (const auto& transport : transports_) {
    urls.push_back(transport.name + "://" + (transport.name == "shm" ? "" : bracketed(address_)));
  }
  if (!shared_->callbacks.begin()) throw Error(ErrorCode::kShutdown, "cannot listen: the transport is closed");
  acceptor_ = std::move(acceptor);
  try {
    listener_ = context_.listen(urls);
  } catch (const std::exception& error) {
    shared_->callbacks.end();
    throw Error(
        ErrorCode::kRendezvous, describe() + " cannot listen on " + address_ + ": " + error.what() + ". " + kAskDoctor);
  }
  TensorPipeAddress address;
  for (const auto& [name, transport] : transports_) {
    urls_.push_back(listener_->url(name));
    address.endpoints.push_back({urls_.back(), transport->domainDescriptor()});
  }
  address.channels = !channels_.empty();
  acceptNext();
  return address.text();
}

void TensorPipeTransport::acceptNext() {
  listener_->accept(
      [this](const tensorpipe::Error& error, const std::shared_ptr<tensorpipe::Pipe>& pipe) { onAccept(error, pipe); });
}

void TensorPipeTransport::onAccept(
    const tensorpipe::Error& error, const std::shared_ptr<tensorpipe::Pipe>& pipe) noexcept {
  if (error) return onListenerFailed(error);
  LoopScope scope(shared_->callbacks);
  acceptNext();
  if (!shared_->callbacks.begin()) return pipe->close();
  const std::string& remote = pipe->getRemoteName();
  TensorPipeConnection::Peer peer;
  peer.channels = !channels_.empty() && remote.starts_with(kWithChannels);
  peer.route = "accepted from " + remote.substr(std::min(kWithChannels.size(), remote.size()));
  auto connection = std::make_shared<TensorPipeConnection>(shared_, pipe, std::move(peer));
  auto handler = acceptor_(connection);
  if (!handler) {
    pipe->close();
    return shared_->callbacks.end();
  }
  connection->start(std::move(handler));
}

void TensorPipeTransport::onListenerFailed(const tensorpipe::Error& error) {
  if (shared_->callbacks.closed()) return shared_->callbacks.end();
  if (!recovery_) {
    recovery_ = std::make_unique<TaskThread>();
    static LogOnce once;
    once.log(LogLevel::kWarning, "listens again: TensorPipe's listener failed (" + reasonOf(error) + ")");
  }
  recovery_->post([this] { listenAgain(); });
}

void TensorPipeTransport::listenAgain() {
  listener_->close();
  const auto is_free = [](const std::string& url) {
    // If an address of shm is still in use, the new listener fails and this function runs again. If a TCP port is in
    // use, TensorPipe terminates the process.
    return url.starts_with("shm://") || isPortFree(url.substr(url.find("://") + 3));
  };
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (shared_->callbacks.closed()) return shared_->callbacks.end();
  } while (!std::all_of(urls_.begin(), urls_.end(), is_free));
  listener_ = context_.listen(urls_);
  acceptNext();
}

const TensorPipeAddress::Endpoint& TensorPipeTransport::chooseEndpoint(
    const TensorPipeAddress& address, const std::string& peer_name) const {
  for (const auto& [name, transport] : transports_) {
    for (const auto& endpoint : address.endpoints) {
      if (endpoint.transport() == name && transport->canCommunicateWithRemote(endpoint.domain)) return endpoint;
    }
  }
  std::string theirs;
  for (const auto& endpoint : address.endpoints) theirs += (theirs.empty() ? "" : ", ") + endpoint.url;
  throw Error(
      ErrorCode::kInvalidArgument,
      "cannot connect to " + peer_name + ": it can be reached by " + theirs + ", this node uses " +
          namesOf(transports_) + " (shm: within one host only); give both the same transports. " + kAskDoctor,
      peer_name);
}

std::shared_ptr<Connection> TensorPipeTransport::connect(
    const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) {
  const auto parsed = TensorPipeAddress::parse(address);
  const auto& endpoint = chooseEndpoint(parsed, peer_name);
  if (!shared_->callbacks.begin()) {
    throw Error(ErrorCode::kShutdown, "cannot connect to " + peer_name + ": the transport is closed", peer_name);
  }
  std::shared_ptr<tensorpipe::Pipe> pipe;
  try {
    pipe = context_.connect(endpoint.url, tensorpipe::PipeOptions().remoteName(peer_name));
  } catch (const std::exception& error) {
    shared_->callbacks.end();
    throw Error(
        ErrorCode::kInvalidArgument, "cannot connect to " + peer_name + " at " + endpoint.url + ": " + error.what(),
        peer_name);
  }
  auto connection = std::make_shared<TensorPipeConnection>(
      shared_, std::move(pipe),
      TensorPipeConnection::Peer{peer_name, endpoint.url, parsed.channels && !channels_.empty()});
  connection->start(std::move(handler));
  timer_->after(handshake_deadline_, [weak = std::weak_ptr(connection)] {
    if (const auto opened = weak.lock()) opened->requireHandshake();
  });
  return connection;
}

void TensorPipeTransport::close() {
  std::call_once(close_once_, [this] {
    shared_->callbacks.close();
    timer_->close();
    context_.close();
    shared_->callbacks.wait();
    recovery_.reset();
    context_.join();
    shared_->disposal.stop();
  });
}

}  // namespace

std::unique_ptr<Transport> makeTensorPipeTransport(const TensorPipeOptions& options) {
  return std::make_unique<TensorPipeTransport>(options);
}

}  // namespace torchrpc
