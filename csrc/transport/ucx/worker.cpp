// Note [One thread for a worker]
// UCX makes progress only inside its functions, and only one thread at a time may use a UCX worker. So only the loop
// thread uses it; other threads post tasks and wake the loop thread by ucp_worker_signal(). The loop thread sleeps on
// the worker's event descriptor, but only after ucp_worker_arm() has found nothing to do. A signal that was sent before
// makes ucp_worker_arm() report work. (The loop thread itself posts without a signal, so it checks for posted tasks
// before it sleeps.) UCX calls back inside ucp_worker_progress(), where endpoints cannot be closed. So callbacks post a
// task that closes the endpoint.
//
// Note [Peers that die]
// Endpoints have UCP_ERR_HANDLING_MODE_PEER, so that UCX reports the death of a peer. UCX then uses only transports
// that detect it. Its shared memory does not, so workers of one host communicate over TCP. UCX_MM_ERROR_HANDLING=y and
// similar variables (UCX_POSIX_…, UCX_SYSV_…) make UCX use shared memory nevertheless; with them, UCX 1.13 and 1.22
// have aborted in our tests.
//
// Note [The end of a connection]
// UCX notifies a peer of the close of an endpoint on another path than its messages, so the notification may overtake
// messages. Therefore a connection that is closed here sends an end message after its last frame, and keeps its
// endpoint until the peer, which has then read everything, has closed its own. If the peer does not do that within
// kFarewell, because it hangs, this side closes the endpoint.
//
// Note [The end of a listener]
// UCX's own thread accepts connections, reads each peer's connection request, and passes it to the listener. If the
// listener is destroyed while the thread has read half of a request, the thread reads on until the worker is destroyed,
// and then uses the destroyed listener (UCX issue 11087, seen from 1.13 to 1.19). So that thread is paused while the
// listener and the worker are destroyed.
//
// Note [Refused connections]
// Up to 1.20, UCX crashes if more data arrives on a connection that ucp_listener_reject() has refused (UCX issue
// 11235). So refuse() makes an endpoint for the connection and closes it at once.

#include "transport/ucx/worker.h"

#include <algorithm>
#include <cerrno>
#include <poll.h>
#include <string>

#include "base/doctor.h"
#include "base/error.h"
#include "base/executor/scheduling.h"
#include "base/executor/start_thread.h"
#include "base/os/threads.h"
#include "transport/ucx/async_thread.h"
#include "transport/ucx/connection.h"

namespace torchrpc::ucx {

namespace {

constexpr auto kFarewell = std::chrono::seconds(1);

[[noreturn]] void throwUnusable(const Libucp& ucp, const char* what, ucs_status_t status) {
  throwInvalidArgument(
      std::string("UCX cannot ") + what + " here: " + ucp.ucs_status_string(status) +
      ". UCX_TLS and the other variables of UCX say what it may use; `ucx_info -d` shows what there is");
}

}  // namespace

UcxWorker::UcxWorker(const Limits& limits)
    : ucp(Libucp::get()),
      limits(limits),
      context_(makeContext()),
      worker_(makeWorker()),
      event_descriptor_(eventDescriptor()),
      thread_(startThread("of the transport's event loop", [this] { run(); })) {}

UcxWorker::Context UcxWorker::makeContext() const {
  ucp_config_t* config = nullptr;
  if (const auto status = ucp.ucp_config_read(nullptr, nullptr, &config); status != UCS_OK) {
    throwUnusable(ucp, "read its settings", status);
  }
  // The messages of an endpoint stay in order only if a single device sends them.
  ucp.ucp_config_modify(config, "MAX_EAGER_LANES", "1");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  ucp_context_h context = nullptr;
  const auto status = ucp.ucp_init_version(kUcxMajor, kUcxMinor, &params, config, &context);
  ucp.ucp_config_release(config);
  if (status != UCS_OK) throwUnusable(ucp, "start", status);
  return {context, ucp.ucp_cleanup};
}

UcxWorker::Handle UcxWorker::makeWorker() const {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucp_worker_h handle = nullptr;
  if (const auto status = ucp.ucp_worker_create(context_.get(), &params, &handle); status != UCS_OK) {
    throwUnusable(ucp, "make a worker", status);
  }
  Handle worker(handle, ucp.ucp_worker_destroy);
  const auto handle_messages = [&](PartKind kind, ucp_am_recv_callback_t callback) {
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = static_cast<unsigned>(kind);
    handler.cb = callback;
    handler.arg = const_cast<UcxWorker*>(this);
    if (const auto status = ucp.ucp_worker_set_am_recv_handler(handle, &handler); status != UCS_OK) {
      throwUnusable(ucp, "receive active messages", status);
    }
  };
  handle_messages(PartKind::kHead, &onMessage<PartKind::kHead>);
  handle_messages(PartKind::kSegment, &onMessage<PartKind::kSegment>);
  handle_messages(PartKind::kEnd, &onMessage<PartKind::kEnd>);
  return worker;
}

int UcxWorker::eventDescriptor() const {
  int descriptor = -1;
  if (const auto status = ucp.ucp_worker_get_efd(handle(), &descriptor); status != UCS_OK) {
    throwUnusable(ucp, "wait for events", status);
  }
  return descriptor;
}

void UcxWorker::post(std::function<void()> task) {
  // The signal is sent with the lock, so that the loop cannot run the task before it: after the task, the transport may
  // destroy the worker.
  const MutexLock lock(mutex_);
  const bool was_empty = posted_.empty();
  posted_.push_back(std::move(task));
  if (was_empty && !LoopScope::in(callbacks)) ucp.ucp_worker_signal(handle());
}

void UcxWorker::stop(const std::function<void()>& before_end) {
  post([this] { stopping_ = true; });
  thread_.join();
  to_release_.clear();
  {
    const AsyncThreadPause pause(ucp);  // Note [The end of a listener]
    before_end();
    worker_.reset();
  }
  context_.reset();
}

// ---- the loop thread ----

void UcxWorker::run() {
  os::setThreadName("torchrpc_ucx");
  Scheduling().applyBatchPolicy();
  const LoopScope scope(callbacks);
  for (;;) {
    releaseOverdue();
    runPosted();
    if (ucp.ucp_worker_progress(handle()) != 0 || hasPosted()) continue;
    if (stopping_ && connections_.empty() && closing_ == 0) return;
    sleep();
  }
}

bool UcxWorker::hasPosted() {
  const MutexLock lock(mutex_);
  return !posted_.empty();
}

void UcxWorker::runPosted() {
  std::vector<std::function<void()>> tasks;
  {
    const MutexLock lock(mutex_);
    tasks.swap(posted_);
  }
  for (const auto& task : tasks) task();
}

void UcxWorker::sleep() {
  if (ucp.ucp_worker_arm(handle()) != UCS_OK) return;
  int timeout_ms = -1;
  if (!to_release_.empty()) {
    const auto left = to_release_.front().first - std::chrono::steady_clock::now();
    timeout_ms =
        static_cast<int>(std::max<int64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1, 0));
  }
  pollfd waited{event_descriptor_, POLLIN, 0};
  ::poll(&waited, 1, timeout_ms);
}

void UcxWorker::releaseOverdue() {
  while (!to_release_.empty() && to_release_.front().first <= std::chrono::steady_clock::now()) {
    const auto connection = std::move(to_release_.front().second);
    to_release_.pop_front();
    connection->release();
  }
}

// ---- endpoints ----

ucs_status_t UcxWorker::open(
    ucp_ep_params_t params, const std::shared_ptr<UcxConnection>& connection, ucp_ep_h& endpoint) {
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&onError, this};
  const auto status = ucp.ucp_ep_create(handle(), &params, &endpoint);
  if (status == UCS_OK) connections_.emplace(endpoint, connection);
  return status;
}

void UcxWorker::refuse(ucp_conn_request_h request) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.conn_request = request;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  ucp_ep_h endpoint = nullptr;
  if (ucp.ucp_ep_create(handle(), &params, &endpoint) == UCS_OK) post([this, endpoint] { close(endpoint); });
}

void UcxWorker::close(ucp_ep_h endpoint) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.user_data = this;
  param.cb.send = [](void* request, ucs_status_t, void* self) {
    auto& worker = *static_cast<UcxWorker*>(self);
    --worker.closing_;
    worker.ucp.ucp_request_free(request);
  };
  ++closing_;
  auto* const request = ucp.ucp_ep_close_nbx(endpoint, &param);
  if (!UCS_PTR_IS_PTR(request)) --closing_;
  connections_.erase(endpoint);
}

void UcxWorker::releaseLater(std::shared_ptr<UcxConnection> connection) {
  to_release_.emplace_back(std::chrono::steady_clock::now() + kFarewell, std::move(connection));
}

std::vector<std::shared_ptr<UcxConnection>> UcxWorker::connections() const {
  std::vector<std::shared_ptr<UcxConnection>> list;
  for (const auto& [endpoint, connection] : connections_) list.push_back(connection);
  return list;
}

UcxConnection* UcxWorker::connectionOf(ucp_ep_h endpoint) const {
  const auto found = connections_.find(endpoint);
  return found == connections_.end() ? nullptr : found->second.get();
}

template <PartKind kKind>
ucs_status_t UcxWorker::onMessage(
    void* self, const void* header, size_t header_bytes, void* data, size_t bytes, const ucp_am_recv_param_t* param) {
  // Without this field the connection of the message is unknown. No correct worker sends such a message.
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0) return UCS_OK;
  auto* const connection = static_cast<UcxWorker*>(self)->connectionOf(param->reply_ep);
  if (connection == nullptr) return UCS_OK;  // the endpoint was closed meanwhile
  return connection->onPart(
      kKind, {static_cast<const char*>(header), header_bytes}, data, bytes,
      (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0);
}

void UcxWorker::onError(void* self, ucp_ep_h endpoint, ucs_status_t status) {
  if (auto* const connection = static_cast<UcxWorker*>(self)->connectionOf(endpoint)) connection->onError(status);
}

// ---- the listener ----

UcxListener::UcxListener(UcxWorker& worker, const UcxAddress& address, OnRequest on_request)
    : worker_(worker), on_request_(std::move(on_request)) {
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr = {address.get(), address.bytes()};
  params.conn_handler = {&onRequest, this};
  const auto status = worker_.ucp.ucp_listener_create(worker_.handle(), &params, &listener_);
  if (status == UCS_OK) return;
  throw Error(
      ErrorCode::kRendezvous,
      "UCX cannot listen on " + address.hostAndPort() + ": " + worker_.ucp.ucs_status_string(status) + ". " +
          kAskDoctor);
}

UcxListener::~UcxListener() { worker_.ucp.ucp_listener_destroy(listener_); }

UcxAddress UcxListener::address() const {
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  worker_.ucp.ucp_listener_query(listener_, &attributes);
  return UcxAddress(attributes.sockaddr);
}

void UcxListener::onRequest(ucp_conn_request_h request, void* self) {
  auto& listener = *static_cast<UcxListener*>(self);
  listener.on_request_(request);
}

std::string UcxListener::peerOf(ucp_conn_request_h request) const {
  ucp_conn_request_attr_t attributes{};
  attributes.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR;
  if (worker_.ucp.ucp_conn_request_query(request, &attributes) != UCS_OK) return "an unknown address";
  return UcxAddress(attributes.client_address).hostAndPort();
}

}  // namespace torchrpc::ucx
