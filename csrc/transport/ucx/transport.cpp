// Only the transport stops the worker, so that the loop thread never joins itself. Connections hold the worker.

#include "transport/ucx/transport.h"

#include <future>
#include <mutex>
#include <optional>

#include "transport/host_address.h"
#include "transport/ucx/address.h"
#include "transport/ucx/connection.h"
#include "transport/ucx/worker.h"

namespace torchrpc::ucx {

namespace {

class UcxTransport : public Transport {
 public:
  explicit UcxTransport(const UcxOptions& options)
      : address_(chooseHostAddress({options.host, options.rendezvous_host})),
        ports_(options.ports),
        worker_(std::make_shared<UcxWorker>(options.limits)) {}
  ~UcxTransport() override { close(); }

  std::string listen(Acceptor acceptor) override;
  std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) override;
  void close() override;
  bool inLoop() const override { return LoopScope::in(worker_->callbacks); }
  std::string describe() const override { return std::string("ucx(") + worker_->ucp.ucp_get_version_string() + ")"; }

 private:
  // On the loop.
  std::string listenHere();
  void onRequest(ucp_conn_request_h request);

  // Constant after construction.
  const std::string address_;
  const PortRange ports_;
  const std::shared_ptr<UcxWorker> worker_;

  std::once_flag close_once_;
  Acceptor acceptor_;  ///< written by listen(), before the listener reads it

  std::optional<UcxListener> listener_;  ///< on the loop only, or after the loop thread has ended
};

std::string UcxTransport::listen(Acceptor acceptor) {
  checkCanListen(address_);
  if (!worker_->callbacks.begin()) throw Error(ErrorCode::kShutdown, "cannot listen: the transport is closed");
  acceptor_ = std::move(acceptor);
  const auto listening = std::make_shared<std::promise<std::string>>();
  worker_->post([this, listening] {
    try {
      listening->set_value(listenHere());
    } catch (...) {
      listening->set_exception(std::current_exception());
    }
  });
  auto address = listening->get_future();
  address.wait();
  worker_->callbacks.end();
  return address.get();
}

std::string UcxTransport::listenHere() {
  for (auto port = ports_.first;; ++port) {
    try {
      listener_.emplace(
          *worker_, UcxAddress(address_, port), [this](ucp_conn_request_h request) { onRequest(request); });
      return listener_->address().text();
    } catch (const Error&) {
      if (port == ports_.last) throw;
    }
  }
}

void UcxTransport::onRequest(ucp_conn_request_h request) {
  if (!worker_->callbacks.begin()) return worker_->refuse(request);
  auto connection = std::make_shared<UcxConnection>(
      worker_, UcxConnection::Peer{.name = "", .route = "accepted from " + listener_->peerOf(request)});
  auto handler = acceptor_(connection);
  if (!handler) {
    connection->refuse();
    worker_->refuse(request);
    return worker_->callbacks.end();
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  connection->start(std::move(handler), params);
}

std::shared_ptr<Connection> UcxTransport::connect(
    const std::string& address, const std::string& peer_name, std::shared_ptr<ConnectionHandler> handler) {
  const auto target = UcxAddress::parse(address);
  if (!worker_->callbacks.begin()) {
    throw Error(ErrorCode::kShutdown, "cannot connect to " + peer_name + ": the transport is closed", peer_name);
  }
  auto connection =
      std::make_shared<UcxConnection>(worker_, UcxConnection::Peer{.name = peer_name, .route = target.hostAndPort()});
  worker_->post([connection, handler = std::move(handler), target] {
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
    params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
    params.sockaddr = {target.get(), target.bytes()};
    connection->start(handler, params);
  });
  return connection;
}

void UcxTransport::close() {
  std::call_once(close_once_, [this] {
    worker_->callbacks.close();
    worker_->post([this] {
      for (const auto& connection : worker_->connections()) connection->closeHere();
    });
    worker_->callbacks.wait();
    worker_->stop([this] { listener_.reset(); });
    worker_->disposal.stop();
  });
}

}  // namespace

std::unique_ptr<Transport> makeUcxTransport(const UcxOptions& options) {
  return std::make_unique<UcxTransport>(options);
}

std::string whatUcxLacks() { return Libucp::lacks(); }

}  // namespace torchrpc::ucx
