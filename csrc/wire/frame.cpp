// Converts a message to a frame and back. A head consists of the prefix, the headers, the tensors (tensor_codec) and
// the payload, in this order, so each direction is one pass. No state, any thread.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

#include "wire/message.h"
#include "wire/shared_storage.h"
#include "wire/tensor_codec.h"

namespace torchrpc {

namespace {

struct HeadPrefix {
  Kind kind{};
  uint16_t flags = 0;
  uint32_t headers = 0;
  CallId call = 0;
  uint32_t tensors = 0;
  uint32_t segments = 0;
  uint64_t payload = 0;
};
static_assert(sizeof(HeadPrefix) == 32 && offsetof(HeadPrefix, call) == 8 && offsetof(HeadPrefix, payload) == 24);

constexpr uint16_t kSharesStorages = 1;  // flag: the message has the header SharedStorages

constexpr size_t kHeaderStart = sizeof(HeaderKind) + sizeof(uint64_t);

HeadPrefix readPrefix(std::string_view head) {
  HeadPrefix prefix;
  std::memcpy(&prefix, head.data(), sizeof prefix);
  return prefix;
}

[[noreturn]] void malformedMessage(const std::string& what) {
  throw Error(ErrorCode::kProtocol, "malformed message: " + what);
}

void checkSize(const char* what, uint64_t size, uint64_t limit) {
  if (size <= limit) return;
  throw Error(
      ErrorCode::kFrameTooLarge,
      "a message of " + std::to_string(size) + " " + what + " is larger than the " + std::to_string(limit) +
          " allowed: send it in parts");
}

void checkTotal(const Frame& frame, const Limits& limits) {
  uint64_t bytes = frame.head.size();
  for (const auto& segment : frame.segments) bytes += segment.bytes;  // all are in memory, so the sum cannot overflow
  checkSize("bytes", bytes, limits.frame_bytes);
}

size_t expectedHeadBytes(const Message& message) {
  size_t bytes = sizeof(HeadPrefix) + message.payload.size();
  for (const auto& header : message.headers) bytes += kHeaderStart + header.bytes.size();
  for (const auto& tensor : message.tensors) bytes += tensorHeadBytes(tensor);
  return bytes;
}

/// To be called where `error` has been caught. Throws it again with a text that says which one of several tensors it is
/// about.
[[noreturn]] void rethrowForTensor(const Error& error, const std::vector<at::Tensor>& tensors, size_t index) {
  if (tensors.size() == 1) throw;
  const auto& tensor = tensors[index];
  auto text = error.text() + ". It is tensor " + std::to_string(index + 1) + " of the " +
      std::to_string(tensors.size()) + " tensors of the message, counted in the order of the arguments";
  if (!tensor.is_nested()) text += ", and has the shape " + c10::str(tensor.sizes());
  throw Error(error.code(), text + " and the dtype " + c10::str(tensor.scalar_type()));
}

Frame encodeParts(const Message& message, const Limits& limits, uint16_t flags) {
  checkSize("headers", message.headers.size(), limits.headers);
  checkSize("tensors", message.tensors.size(), limits.tensors);
  checkSize("bytes beside its tensors", message.payload.size(), limits.head_bytes);

  Frame frame;
  frame.head.reserve(expectedHeadBytes(message));
  HeadPrefix prefix{.flags = flags};
  Writer out(frame.head);
  out.putBytes(&prefix, sizeof prefix);
  for (const auto& header : message.headers) {
    out.put(header.kind);
    out.putString(header.bytes);
  }
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    try {
      encodeTensor(message.tensors[i], out, frame.segments, limits);
    } catch (const Error& error) {
      rethrowForTensor(error, message.tensors, i);
    }
  }
  checkSize("bytes beside its tensors", frame.head.size() + message.payload.size(), limits.head_bytes);
  out.putBytes(message.payload.data(), message.payload.size());
  checkTotal(frame, limits);

  prefix.kind = message.kind;
  prefix.headers = static_cast<uint32_t>(message.headers.size());
  prefix.call = message.call;
  prefix.tensors = static_cast<uint32_t>(message.tensors.size());
  prefix.segments = static_cast<uint32_t>(frame.segments.size());
  prefix.payload = message.payload.size();
  std::memcpy(frame.head.data(), &prefix, sizeof prefix);
  return frame;
}

}  // namespace

Frame encodeFrame(const Message& message, const Limits& limits) {
  if (const auto shared = withSharedStorages(message, limits.hides_gaps))
    return encodeParts(*shared, limits, kSharesStorages);
  return encodeParts(message, limits, 0);
}

Message decodeFrame(Frame&& frame, const Limits& limits) {
  Reader in(frame.head);
  const auto prefix = readPrefix(in.getBytes(sizeof(HeadPrefix)));
  if ((prefix.flags & ~kSharesStorages) != 0) malformedMessage("unknown flags");
  if (frame.head.size() > limits.head_bytes) malformedMessage("larger than the limit allows");
  if (prefix.headers > limits.headers || prefix.tensors > limits.tensors)
    malformedMessage("more parts than the limit allows");
  if (prefix.segments != frame.segments.size())
    malformedMessage("its number of segments differs from that of the frame");

  Message message{.kind = prefix.kind, .call = prefix.call};
  message.headers.reserve(prefix.headers);
  for (uint32_t i = 0; i < prefix.headers; ++i) {
    const auto kind = in.get<HeaderKind>();
    message.headers.push_back({kind, std::string(in.getString())});
  }
  // Every tensor occupies at least 4 bytes, so the size of the head limits the memory that a false count can reserve.
  message.tensors.reserve(std::min<size_t>(prefix.tensors, in.remaining() / 4));
  std::span<Segment> segments(frame.segments);
  try {
    for (uint32_t i = 0; i < prefix.tensors; ++i) message.tensors.push_back(decodeTensor(in, segments, limits));
  } catch (const c10::Error& error) {
    malformedMessage(error.what_without_backtrace());
  }
  if (!segments.empty()) malformedMessage("segments that belong to no tensor");
  message.payload = in.getBytes(prefix.payload);
  in.expectEnd();
  if (prefix.flags != 0) restoreSharedStorages(message);
  return message;
}

std::optional<FrameInfo> peekFrame(std::string_view head) {
  if (head.size() < sizeof(HeadPrefix)) return std::nullopt;
  const auto prefix = readPrefix(head);
  return FrameInfo{prefix.kind, prefix.call};
}

Frame encodeCopy(const Message& message, const Limits& limits) {
  Frame frame = encodeFrame(message, limits);
  for (auto& segment : frame.segments) segment = copyOf(segment);
  return frame;
}

void copySharedSegments(Frame& frame) {
  for (auto& segment : frame.segments) {
    if (segment.is_shared) segment = copyOf(segment);
  }
}

Message copyMessage(const Message& message) { return decodeFrame(encodeCopy(message)); }

}  // namespace torchrpc
