// A message as a frame and back: the fixed part, the headers, the tensors (tensor_codec), the payload. In the head the
// parts follow each other, so each direction is one pass. No state, any thread.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

#include "wire/message.h"
#include "wire/tensor_codec.h"

namespace torchrpc {

namespace {

struct Fixed {
  Kind kind{};
  uint16_t flags = 0;
  uint32_t headers = 0;
  CallId call = 0;
  uint32_t tensors = 0;
  uint32_t segments = 0;
  uint64_t payload = 0;
};
static_assert(sizeof(Fixed) == 32 && offsetof(Fixed, call) == 8 && offsetof(Fixed, payload) == 24);

constexpr size_t kHeaderStart = sizeof(HeaderKind) + sizeof(uint64_t);

Fixed getFixed(std::string_view head) {
  Fixed fixed;
  std::memcpy(&fixed, head.data(), sizeof fixed);
  return fixed;
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

size_t expectedHeadBytes(const Message& message) {
  size_t bytes = sizeof(Fixed) + message.payload.size();
  for (const auto& header : message.headers) bytes += kHeaderStart + header.bytes.size();
  for (const auto& tensor : message.tensors) bytes += tensorHeadBytes(tensor);
  return bytes;
}

}  // namespace

Frame encodeFrame(const Message& message, const Limits& limits) {
  checkSize("headers", message.headers.size(), limits.headers);
  checkSize("tensors", message.tensors.size(), limits.tensors);
  checkSize("bytes beside its tensors", message.payload.size(), limits.head_bytes);

  Frame frame;
  frame.head.reserve(expectedHeadBytes(message));
  Fixed fixed;
  Writer out(frame.head);
  out.putBytes(&fixed, sizeof fixed);
  for (const auto& header : message.headers) {
    out.put(header.kind);
    out.putString(header.bytes);
  }
  for (const auto& tensor : message.tensors) encodeTensor(tensor, out, frame.segments, limits);
  checkSize("bytes beside its tensors", frame.head.size() + message.payload.size(), limits.head_bytes);
  out.putBytes(message.payload.data(), message.payload.size());

  fixed.kind = message.kind;
  fixed.headers = static_cast<uint32_t>(message.headers.size());
  fixed.call = message.call;
  fixed.tensors = static_cast<uint32_t>(message.tensors.size());
  fixed.segments = static_cast<uint32_t>(frame.segments.size());
  fixed.payload = message.payload.size();
  std::memcpy(frame.head.data(), &fixed, sizeof fixed);
  return frame;
}

Message decodeFrame(Frame frame, const Limits& limits) {
  Reader in(frame.head);
  const auto fixed = getFixed(in.getBytes(sizeof(Fixed)));
  if (fixed.flags != 0) malformedMessage("unknown flags");
  if (frame.head.size() > limits.head_bytes) malformedMessage("larger than the limit allows");
  if (fixed.headers > limits.headers || fixed.tensors > limits.tensors)
    malformedMessage("more parts than the limit allows");
  if (fixed.segments != frame.segments.size()) malformedMessage("it came with another number of segments");

  Message message{.kind = fixed.kind, .call = fixed.call};
  message.headers.reserve(fixed.headers);
  for (uint32_t i = 0; i < fixed.headers; ++i) {
    const auto kind = in.get<HeaderKind>();
    message.headers.push_back({kind, std::string(in.getString())});
  }
  // No tensor is smaller than 4 bytes, so that the head's size bounds what a lying count can reserve.
  message.tensors.reserve(std::min<size_t>(fixed.tensors, in.remaining() / 4));
  std::span<Segment> segments(frame.segments);
  try {
    for (uint32_t i = 0; i < fixed.tensors; ++i) message.tensors.push_back(decodeTensor(in, segments, limits));
  } catch (const c10::Error& error) {
    malformedMessage(error.what_without_backtrace());
  }
  if (!segments.empty()) malformedMessage("segments that belong to no tensor");
  message.payload = in.getBytes(fixed.payload);
  in.expectEnd();
  return message;
}

std::optional<FrameInfo> peekFrame(std::string_view head) {
  if (head.size() < sizeof(Fixed)) return std::nullopt;
  const auto fixed = getFixed(head);
  return FrameInfo{fixed.kind, fixed.call};
}

Frame encodeCopy(const Message& message, const Limits& limits) {
  Frame frame = encodeFrame(message, limits);
  for (auto& segment : frame.segments) {
    auto copy = makeStorage(segment.bytes);
    std::memcpy(copy.mutable_data(), segment.data(), segment.bytes);
    segment = {std::move(copy), 0, segment.bytes};
  }
  return frame;
}

Message copyMessage(const Message& message) { return decodeFrame(encodeCopy(message)); }

}  // namespace torchrpc
