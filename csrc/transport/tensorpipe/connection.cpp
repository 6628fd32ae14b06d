// Note [Frames as TensorPipe messages]
// A head of at most kMaxMetadataBytes is sent as the metadata of the message, which arrives with the descriptor: the
// receiver needs one read instead of two (uv: 45 µs per round trip instead of 77). A larger head is the first payload,
// because TensorPipe reads metadata byte by byte. An empty head is the first payload, too. In both cases the metadata
// is empty. All segments are tensors if one of them has at least kMinChannelBytes and both sides have channels;
// otherwise all are payloads. So the receiver can tell the head and the segments apart by the descriptor alone.

#include "transport/tensorpipe/connection.h"

#include <utility>

#include "transport/frame_memory.h"

namespace torchrpc {

namespace {

constexpr size_t kMaxMetadataBytes = 32 << 10;
constexpr size_t kMinChannelBytes = 512 << 10;

}  // namespace

std::string reasonOf(const tensorpipe::Error& error) {
  const auto text = error.what();
  // shm and uv report the end of a connection differently.
  const bool ended = error.isOfType<tensorpipe::EOFError>() || text.starts_with("EOF:");
  return ended ? "the peer died or closed the connection" : text.substr(0, text.find(" (this error originated at "));
}

/// Owns a frame's memory until TensorPipe has written the frame.
struct TensorPipeConnection::Outgoing {
  Frame frame;
  SentHandler done;
};

TensorPipeConnection::TensorPipeConnection(
    std::shared_ptr<TensorPipeShared> shared, std::shared_ptr<tensorpipe::Pipe> pipe, Peer peer)
    : shared_(std::move(shared)), pipe_(std::move(pipe)), peer_(std::move(peer)) {}

void TensorPipeConnection::start(std::shared_ptr<ConnectionHandler> handler) {
  handler_ = std::move(handler);
  readNext();
}

std::string TensorPipeConnection::describe() const {
  return "tensorpipe connection to " + (peer_.name.empty() ? "a peer" : peer_.name) + " (" + peer_.route + ")";
}

void TensorPipeConnection::close() {
  closed_here_ = true;
  pipe_->close();
}

void TensorPipeConnection::requireHandshake() {
  auto awaited = Handshake::kAwaited;
  if (handshake_.compare_exchange_strong(awaited, Handshake::kLate)) pipe_->close();
}

void TensorPipeConnection::onHandshakeFinished() {
  auto state = handshake_.load();
  while (state < Handshake::kFinished && !handshake_.compare_exchange_weak(state, Handshake::kFinished)) {
  }
}

// ---- sending ----

namespace {

tensorpipe::Message toMessage(Frame& frame, bool channels) {
  tensorpipe::Message message;
  const bool inline_head = !frame.head.empty() && frame.head.size() <= kMaxMetadataBytes;
  if (inline_head) {
    message.metadata = std::move(frame.head);
  } else {
    message.payloads.push_back({frame.head.data(), frame.head.size(), {}});
  }
  bool large = false;
  for (const auto& segment : frame.segments) large |= segment.bytes >= kMinChannelBytes;
  for (const auto& segment : frame.segments) {
    // TensorPipe requires a non-const pointer but only reads. mutable_data() would copy a shared copy-on-write storage.
    auto* data = const_cast<void*>(segment.data());
    if (large && channels) {
      message.tensors.push_back({tensorpipe::CpuBuffer{data}, segment.bytes, {}, {}});
    } else {
      message.payloads.push_back({data, segment.bytes, {}});
    }
  }
  return message;
}

}  // namespace

void TensorPipeConnection::send(Frame&& frame, SentHandler&& done) {
  if (auto error = checkFrame(frame, shared_->limits)) return done(std::move(error));
  if (!shared_->callbacks.begin()) return done(Error(ErrorCode::kShutdown, describe() + " was closed from this side"));
  auto outgoing = std::make_shared<Outgoing>(Outgoing{std::move(frame), std::move(done)});
  auto message = toMessage(outgoing->frame, peer_.channels);
  auto unknown = Handshake::kUnknown;
  handshake_.compare_exchange_strong(unknown, Handshake::kAwaited);
  pipe_->write(std::move(message), [self = shared_from_this(), outgoing](const tensorpipe::Error& error) {
    self->onSent(error, *outgoing);
  });
}

void TensorPipeConnection::onSent(const tensorpipe::Error& error, Outgoing& outgoing) noexcept {
  {
    LoopScope scope(shared_->callbacks);
    if (!error) onHandshakeFinished();
    shared_->disposal.drop(std::move(outgoing.frame));
    std::exchange(outgoing.done, nullptr)(error ? Status(closeReason(error)) : std::nullopt);
  }
  shared_->callbacks.end();
}

// ---- receiving ----

void TensorPipeConnection::readNext() {
  pipe_->readDescriptor([self = shared_from_this()](const tensorpipe::Error& error, tensorpipe::Descriptor descriptor) {
    self->onDescriptor(error, std::move(descriptor));
  });
}

namespace {

Status checkDescriptor(
    const tensorpipe::Descriptor& descriptor, bool head_is_payload, bool channels, const Limits& limits) {
  const size_t payload_segments = descriptor.payloads.size() - (head_is_payload ? 1 : 0);
  if (payload_segments > 0 && !descriptor.tensors.empty()) {
    return Error(ErrorCode::kProtocol, "a message with segments both as payloads and as tensors");
  }
  if (!channels && !descriptor.tensors.empty()) {
    return Error(ErrorCode::kProtocol, "a tensor for a channel, though the two sides share none");
  }
  if (payload_segments + descriptor.tensors.size() > limits.tensors) {
    return Error(ErrorCode::kFrameTooLarge, "a message of more than " + std::to_string(limits.tensors) + " segments");
  }
  const auto head_bytes = head_is_payload ? descriptor.payloads.front().length : descriptor.metadata.size();
  FrameSize size(limits);
  if (auto error = size.add("head", head_bytes, limits.head_bytes)) return error;
  for (size_t i = head_is_payload ? 1 : 0; i < descriptor.payloads.size(); ++i) {
    if (auto error = size.add("segment", descriptor.payloads[i].length, limits.segment_bytes)) return error;
  }
  for (const auto& tensor : descriptor.tensors) {
    if (tensor.sourceDevice.type != tensorpipe::kCpuDeviceType) {
      return Error(ErrorCode::kProtocol, "a tensor that is not in main memory");
    }
    if (auto error = size.add("segment", tensor.length, limits.segment_bytes)) return error;
  }
  return std::nullopt;
}

/// Allocates the parts of `frame` that the descriptor announces. Throws the exceptions of the allocators.
tensorpipe::Allocation allocate(tensorpipe::Descriptor& descriptor, bool head_is_payload, Frame& frame) {
  tensorpipe::Allocation allocation;
  if (head_is_payload) {
    frame.head.resize(descriptor.payloads.front().length);
    allocation.payloads.push_back({frame.head.data()});
  } else {
    frame.head = std::move(descriptor.metadata);
  }
  frame.segments.reserve(descriptor.payloads.size() + descriptor.tensors.size());
  for (size_t i = head_is_payload ? 1 : 0; i < descriptor.payloads.size(); ++i) {
    frame.segments.push_back(newSegment(descriptor.payloads[i].length));
    allocation.payloads.push_back({frame.segments.back().mutableData()});
  }
  for (const auto& tensor : descriptor.tensors) {
    frame.segments.push_back(newSegment(tensor.length));
    allocation.tensors.push_back({tensorpipe::CpuBuffer{frame.segments.back().mutableData()}});
  }
  return allocation;
}

}  // namespace

void TensorPipeConnection::onDescriptor(const tensorpipe::Error& error, tensorpipe::Descriptor descriptor) noexcept {
  LoopScope scope(shared_->callbacks);
  if (error) return finish(closeReason(error));
  onHandshakeFinished();
  const bool head_is_payload = descriptor.metadata.empty();
  const bool is_whole = !head_is_payload && descriptor.payloads.empty() && descriptor.tensors.empty();
  if (head_is_payload && descriptor.payloads.empty()) {
    return finish({ErrorCode::kProtocol, describe() + ": a message without a head"});
  }
  if (auto refused = checkDescriptor(descriptor, head_is_payload, peer_.channels, shared_->limits)) {
    return finish({refused->code(), describe() + ": " + refused->text()});
  }
  auto frame = std::make_shared<Frame>();
  tensorpipe::Allocation allocation;
  try {
    allocation = allocate(descriptor, head_is_payload, *frame);
  } catch (const std::exception& failure) {
    return finish({ErrorCode::kFrameTooLarge, describe() + ": no memory for a message: " + failure.what()});
  }
  if (!is_whole) {
    return pipe_->read(std::move(allocation), [self = shared_from_this(), frame](const tensorpipe::Error& error) {
      self->onBody(error, *frame);
    });
  }
  // Nothing is left to read, but TensorPipe requires the call. The next readDescriptor() reports errors of this read.
  pipe_->read(std::move(allocation), [](const tensorpipe::Error&) {});
  handler_->onFrame(std::move(*frame));
  readNext();
}

void TensorPipeConnection::onBody(const tensorpipe::Error& error, Frame& frame) noexcept {
  LoopScope scope(shared_->callbacks);
  if (error) return finish(closeReason(error));
  handler_->onFrame(std::move(frame));
  readNext();
}

// ---- the end ----

void TensorPipeConnection::finish(const Error& reason) {
  pipe_->close();
  auto handler = std::move(handler_);
  handler->onClosed(reason);
  handler.reset();
  shared_->callbacks.end();
}

Error TensorPipeConnection::lost(const std::string& reason) const {
  const auto peer = peer_.name.empty() ? "a peer" : peer_.name;
  return {
      ErrorCode::kWorkerLost, "the connection to " + peer + " (tensorpipe, " + peer_.route + ") is lost: " + reason,
      peer_.name};
}

Error TensorPipeConnection::closeReason(const tensorpipe::Error& error) const {
  if (!closed_here_ && !shared_->callbacks.closed()) {
    return lost(
        handshake_ == Handshake::kLate ? "the peer did not finish TensorPipe's handshake in time" : reasonOf(error));
  }
  return {ErrorCode::kShutdown, describe() + " was closed from this side"};
}

}  // namespace torchrpc
