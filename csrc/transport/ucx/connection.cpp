// Note [Frames as active messages]
// A frame is sent as one active message for its head and one for each segment, so that each message is contiguous in
// memory. UCX sends large messages by rendezvous: it copies them, or lets the network copy them, into the memory that
// the receiver allocates. An active message has a header of 12 bytes, in the byte order of the sender (as everything
// that UCX sends): the number of the message (64 bits), from 0 on in each direction of a connection, and the number of
// segments that follow the head (32 bits; 0 in other messages). The id of the message (PartKind) says whether it is a
// head, a segment or the end of the connection.
// UCX usually delivers the messages of an endpoint in order (MAX_EAGER_LANES in worker.cpp), but guarantees no order: a
// message that has overtaken others waits in early_. The data of a rendezvous arrives later than its message, and later
// than messages after it: so parts wait in incoming_ and become frames in order. The receiver starts only one
// rendezvous at a time, that of the front part. So a peer can make it allocate memory for one segment whose data has
// not arrived, and otherwise only for data that has arrived. A sender sends at most kMaxSentAhead parts beyond the
// oldest part that UCX has not finished. So few parts of a correct peer wait, and a receiver disconnects a peer of
// which more than kMaxIncoming parts wait.

#include "transport/ucx/connection.h"

#include <cstring>
#include <utility>
#include <vector>

namespace torchrpc::ucx {

namespace {

constexpr uint64_t kMaxSentAhead = 1024;
constexpr size_t kMaxIncoming = 8 * kMaxSentAhead;

}  // namespace

UcxConnection::UcxConnection(std::shared_ptr<UcxWorker> worker, Peer peer)
    : worker_(std::move(worker)), peer_(std::move(peer)) {}

std::string UcxConnection::describe() const {
  return "ucx connection to " + (peer_.name.empty() ? "a peer" : peer_.name) + " (" + peer_.route + ")";
}

void UcxConnection::start(std::shared_ptr<ConnectionHandler> handler, const ucp_ep_params_t& params) {
  handler_ = std::move(handler);
  const auto status = worker_->open(params, shared_from_this(), endpoint_);
  if (status != UCS_OK) return finish(lost(status));
  if (worker_->callbacks.closed()) closeHere();  // the transport's close() has not seen this connection
}

void UcxConnection::refuse() { reason_ = closedHere(); }

// ---- sending ----

void UcxConnection::send(Frame&& frame, SentHandler&& done) {
  if (auto error = checkFrame(frame, worker_->limits)) return done(std::move(error));
  if (!worker_->callbacks.begin()) return done(closedHere());
  auto outgoing = std::make_shared<Outgoing>(Outgoing{std::move(frame), std::move(done)});
  worker_->post([self = shared_from_this(), outgoing] { self->enqueue(outgoing); });
}

void UcxConnection::enqueue(std::shared_ptr<Outgoing> frame) {
  if (reason_) return finishPart(*frame, reason_);
  queue_.push_back(std::move(frame));
  sendQueued();
}

void UcxConnection::sendQueued() {
  const auto may_send = [&] { return sent_.empty() || next_sent_ - sent_.begin()->first < kMaxSentAhead; };
  while (!queue_.empty() && may_send()) {
    const auto outgoing = queue_.front();
    const auto& [head, segments, failure] = outgoing->frame;
    const size_t part = outgoing->next_part++;
    const bool is_last = part == segments.size();
    if (is_last) queue_.pop_front();
    if (part == 0) {
      sendPart(PartKind::kHead, static_cast<uint32_t>(segments.size()), head.data(), head.size(), outgoing);
    } else {
      sendPart(PartKind::kSegment, 0, segments[part - 1].data(), segments[part - 1].bytes, outgoing);
    }
    if (is_last) finishPart(*outgoing, std::nullopt);
  }
}

void UcxConnection::sendPart(
    PartKind kind, uint32_t segments, const void* data, size_t bytes, std::shared_ptr<Outgoing> frame) {
  const auto number = next_sent_++;
  if (frame) ++frame->unfinished;
  auto& part = sent_[number];
  part.connection = shared_from_this();
  part.frame = std::move(frame);
  part.number = number;
  std::memcpy(part.header, &number, sizeof(number));
  std::memcpy(part.header + sizeof(number), &segments, sizeof(segments));
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
      UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.flags = UCP_AM_SEND_FLAG_REPLY;  // the receiver identifies the connection by the reply endpoint
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  param.user_data = &part;
  param.cb.send = [](void* request, ucs_status_t status, void* user_data) {
    const auto& sent = *static_cast<SentPart*>(user_data);
    const auto connection = sent.connection;
    connection->onSent(sent.number, status);
    connection->worker_->ucp.ucp_request_free(request);
    // Posted, because UCX may have called this callback inside sendQueued().
    if (!connection->queue_.empty()) connection->worker_->post([connection] { connection->sendQueued(); });
  };
  auto* const request = worker_->ucp.ucp_am_send_nbx(
      endpoint_, static_cast<unsigned>(kind), part.header, sizeof(part.header), data, bytes, &param);
  if (!UCS_PTR_IS_PTR(request)) onSent(number, UCS_PTR_RAW_STATUS(request));
}

void UcxConnection::onSent(uint64_t number, ucs_status_t status) {
  const auto part = sent_.extract(number);
  if (status != UCS_OK) fail(lost(status));
  const auto& frame = part.mapped().frame;
  if (frame) finishPart(*frame, status == UCS_OK ? std::nullopt : reason_);
}

void UcxConnection::finishPart(Outgoing& frame, const Status& error) {
  if (error && !frame.error) frame.error = error;
  if (--frame.unfinished > 0) return;
  worker_->disposal.drop(std::move(frame.frame));
  std::exchange(frame.done, nullptr)(std::move(frame.error));
  worker_->callbacks.end();
}

// ---- receiving ----

Status UcxConnection::check(const Message& message) {
  const auto malformed = [](const char* what) { return Error(ErrorCode::kProtocol, what); };
  if (message.kind == PartKind::kSegment) {
    if (announced_segments_ == 0) return malformed("a segment that no head announces");
    --announced_segments_;
    return announced_bytes_->add("segment", message.bytes, worker_->limits.segment_bytes);
  }
  if (message.kind == PartKind::kEnd) {
    if (message.bytes > 0) return malformed("an end with data");  // for which no memory is allocated
    return std::nullopt;
  }
  if (announced_segments_ != 0) return malformed("a head before the segments of the last");
  if (message.segments > worker_->limits.tensors) {
    return Error(
        ErrorCode::kFrameTooLarge, "a message of more than " + std::to_string(worker_->limits.tensors) + " segments");
  }
  announced_segments_ = message.segments;
  announced_bytes_.emplace(worker_->limits);
  return announced_bytes_->add("head", message.bytes, worker_->limits.head_bytes);
}

ucs_status_t UcxConnection::onPart(
    PartKind kind, std::string_view header, void* data, size_t bytes, bool rendezvous) noexcept {
  if (!handler_) {
    if (kind == PartKind::kEnd) release();  // both sides have closed the connection
    return UCS_OK;
  }
  uint64_t number = 0;
  uint32_t segments = 0;
  if (header.size() != kHeaderBytes) {
    fail({ErrorCode::kProtocol, describe() + ": a message whose header has the wrong size"});
    return UCS_OK;
  }
  std::memcpy(&number, header.data(), sizeof(number));
  std::memcpy(&segments, header.data() + sizeof(number), sizeof(segments));
  const bool is_next = number == next_received_;
  Message message{kind, segments, data, bytes, rendezvous};
  const bool is_kept = is_next ? accept(message) : keep(number, std::move(message));
  while (handler_ && !early_.empty() && early_.begin()->first == next_received_) {
    auto next = early_.extract(early_.begin());
    auto& kept = next.mapped();
    if (!kept.is_rendezvous) kept.data = kept.copy.data();
    if (!accept(kept) && kept.is_rendezvous) worker_->ucp.ucp_am_data_release(worker_->handle(), kept.data);
  }
  takeParts();
  return is_kept && rendezvous ? UCS_INPROGRESS : UCS_OK;
}

bool UcxConnection::accept(const Message& message) {
  ++next_received_;
  auto refused = check(message);
  if (!refused && incoming_.size() >= kMaxIncoming) {
    refused = Error(ErrorCode::kProtocol, "too many messages before the data of an earlier one");
  }
  IncomingPart part{.kind = message.kind, .segments = message.segments, .bytes = message.bytes};
  if (!refused && message.is_rendezvous) {
    part.rendezvous = message.data;
  } else if (!refused) {
    try {
      auto* const memory = allocate(part);
      if (part.bytes > 0) std::memcpy(memory, message.data, part.bytes);
    } catch (const std::exception& failure) {
      refused = Error(ErrorCode::kFrameTooLarge, std::string("no memory for a message: ") + failure.what());
    }
  }
  if (refused) {
    fail({refused->code(), describe() + ": " + refused->text()});
    return false;
  }
  incoming_.push_back(std::move(part));
  return true;
}

bool UcxConnection::keep(uint64_t number, Message message) {
  if (number < next_received_ || early_.contains(number) || early_.size() >= kMaxIncoming) {
    fail({ErrorCode::kProtocol, describe() + ": a message whose number is not possible"});
    return false;
  }
  // accept() checks the size later, in order. Until then the message occupies no more memory than the peer has sent.
  if (!message.is_rendezvous) message.copy.assign(static_cast<const char*>(message.data), message.bytes);
  early_.emplace(number, std::move(message));
  return true;
}

char* UcxConnection::allocate(IncomingPart& part) {
  if (part.kind == PartKind::kSegment) {
    part.segment = newSegment(part.bytes);
    return static_cast<char*>(part.segment.mutableData());
  }
  if (part.kind == PartKind::kHead) part.head.resize(part.bytes);
  return part.head.data();
}

void UcxConnection::takeParts() {
  while (handler_ && !receiving_ && !incoming_.empty()) {
    if (incoming_.front().rendezvous != nullptr && !receiveFront()) return;
    takeFront();
  }
}

bool UcxConnection::receiveFront() {
  auto& part = incoming_.front();
  char* memory = nullptr;
  try {
    memory = allocate(part);
  } catch (const std::exception& failure) {
    fail({ErrorCode::kFrameTooLarge, describe() + ": no memory for a message: " + failure.what()});
    return false;
  }
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  param.user_data = this;
  param.cb.recv_am = [](void* request, ucs_status_t status, size_t, void* user_data) {
    const auto connection = std::move(static_cast<UcxConnection*>(user_data)->receiving_);
    connection->onReceived(status);
    connection->worker_->ucp.ucp_request_free(request);
  };
  auto* const descriptor = std::exchange(part.rendezvous, nullptr);
  auto* const request = worker_->ucp.ucp_am_recv_data_nbx(worker_->handle(), descriptor, memory, part.bytes, &param);
  if (request == nullptr) return true;
  if (UCS_PTR_IS_ERR(request)) {
    fail(lost(UCS_PTR_STATUS(request)));
  } else {
    receiving_ = shared_from_this();
  }
  return false;
}

void UcxConnection::onReceived(ucs_status_t status) {
  if (!handler_) return dropIncoming();
  if (status != UCS_OK) return fail(lost(status));
  takeFront();
  takeParts();
}

void UcxConnection::takeFront() {
  auto part = std::move(incoming_.front());
  incoming_.pop_front();
  if (part.kind == PartKind::kEnd) return fail(lost("the peer died or closed the connection"));
  if (part.kind == PartKind::kHead) {
    frame_.head = std::move(part.head);
    missing_segments_ = part.segments;
  } else {
    frame_.segments.push_back(std::move(part.segment));
    --missing_segments_;
  }
  // After close(), frames that arrive are dropped.
  if (missing_segments_ == 0 && !closed_here_) handler_->onFrame(std::exchange(frame_, {}));
}

// ---- the end ----

void UcxConnection::close() {
  closed_here_ = true;
  if (!worker_->callbacks.begin()) return;  // the transport is closing, and closes this connection
  worker_->post([self = shared_from_this()] {
    self->closeHere();
    self->worker_->callbacks.end();
  });
}

void UcxConnection::closeHere() {
  if (!handler_) return;
  closed_here_ = true;
  finish(closedHere());
  // Note [The end of a connection].
  sendPart(PartKind::kEnd, 0, nullptr, 0, nullptr);
  worker_->releaseLater(shared_from_this());
}

void UcxConnection::onError(ucs_status_t status) noexcept { fail(lost(status)); }

void UcxConnection::fail(const Error& reason) {
  finish(closed_here_ ? closedHere() : reason);
  release();
}

void UcxConnection::finish(const Error& reason) {
  if (!handler_) return;
  reason_ = reason;
  for (const auto& frame : std::exchange(queue_, {})) finishPart(*frame, reason_);
  std::exchange(handler_, nullptr)->onClosed(reason);
  worker_->callbacks.end();
}

void UcxConnection::release() {
  auto* const endpoint = std::exchange(endpoint_, nullptr);
  if (endpoint == nullptr) return;
  worker_->post([self = shared_from_this(), endpoint] {
    if (!self->receiving_) self->dropIncoming();  // otherwise onReceived() drops them
    self->worker_->close(endpoint);
  });
}

void UcxConnection::dropIncoming() {
  for (const auto& part : std::exchange(incoming_, {})) {
    if (part.rendezvous != nullptr) worker_->ucp.ucp_am_data_release(worker_->handle(), part.rendezvous);
  }
  for (const auto& [number, message] : std::exchange(early_, {})) {
    if (message.is_rendezvous) worker_->ucp.ucp_am_data_release(worker_->handle(), message.data);
  }
}

Error UcxConnection::lost(const std::string& reason) const {
  const auto peer = peer_.name.empty() ? "a peer" : peer_.name;
  return {
      ErrorCode::kWorkerLost, "the connection to " + peer + " (ucx, " + peer_.route + ") is lost: " + reason,
      peer_.name};
}

Error UcxConnection::lost(ucs_status_t status) const {
  if (status == UCS_ERR_CONNECTION_RESET) return lost("the peer died or closed the connection");
  if (status == UCS_ERR_REJECTED) return lost("the peer refused the connection");
  return lost(std::string("UCX says: ") + worker_->ucp.ucs_status_string(status));
}

Error UcxConnection::closedHere() const { return {ErrorCode::kShutdown, describe() + " was closed from this side"}; }

}  // namespace torchrpc::ucx
