#include "transport/native/auth/handshake_message.h"

#include <algorithm>

#include "base/error.h"
#include "wire/codec.h"

namespace torchrpc::native {

namespace {

constexpr std::string_view kMagic = "torchrpc";
constexpr size_t kMaxTextBytes = 1024;
constexpr size_t kMaxSettingBytes = 64;
constexpr size_t kMaxPayloadBytes = 4096;

std::string getAtMost(size_t limit, Reader& in) {
  const auto text = in.getShort();
  if (text.size() > limit) throw Error(ErrorCode::kProtocol, "a handshake message with a field that is too long");
  return std::string(text);
}

}  // namespace

std::string HandshakePayload::bytes() const {
  std::string bytes;
  Writer out(bytes);
  out.put(flags);
  out.putShort(std::string_view(name).substr(0, kMaxTextBytes));
  out.putShort(std::string_view(encryption).substr(0, kMaxSettingBytes));
  out.putShort(std::string_view(identity).substr(0, kMaxIdentityBytes));
  return bytes;
}

HandshakePayload HandshakePayload::parse(std::string_view bytes) {
  Reader in(bytes);
  HandshakePayload payload;
  payload.flags = in.get<uint16_t>();
  payload.name = getAtMost(kMaxTextBytes, in);
  payload.encryption = getAtMost(kMaxSettingBytes, in);
  payload.identity = getAtMost(kMaxIdentityBytes, in);
  in.expectEnd();
  if ((payload.flags & ~HandshakeMessage::kAllFlags) == 0) return payload;
  throw Error(ErrorCode::kProtocol, "a handshake message with unknown flags");
}

std::string HandshakeMessage::bytes() const {
  std::string body;
  Writer out(body);
  switch (type) {
    case HandshakeType::kHello:
      out.put(listener);
      out.put(flags);
      out.putShort(std::string_view(group).substr(0, kMaxTextBytes));
      out.putShort(std::string_view(payload).substr(0, kMaxPayloadBytes));
      break;
    case HandshakeType::kWelcome:
    case HandshakeType::kConfirm:
    case HandshakeType::kReady: out.putShort(std::string_view(payload).substr(0, kMaxPayloadBytes)); break;
    case HandshakeType::kRefusal: out.putShort(std::string_view(text).substr(0, kMaxTextBytes)); break;
  }
  std::string message(kMagic);
  Writer prefix(message);
  prefix.put(kVersion);
  prefix.put(type);
  prefix.put(static_cast<uint16_t>(body.size()));
  prefix.put(uint16_t{0});
  return message + body;
}

bool HandshakePrefix::isOurs(std::string_view bytes) { return bytes.starts_with(kMagic); }

HandshakePrefix HandshakePrefix::parse(std::string_view bytes) {
  Reader in(bytes);
  if (!isOurs(in.getBytes(kMagic.size()))) throw Error(ErrorCode::kProtocol, "it does not speak torchrpc's protocol");
  if (const auto version = in.get<uint16_t>(); version != kVersion) {
    throw Error(
        ErrorCode::kProtocol,
        "it speaks version " + std::to_string(version) + " of the native transport's protocol, this worker version " +
            std::to_string(kVersion) + ": install the same torchrpc on all workers");
  }
  HandshakePrefix prefix;
  prefix.type = in.get<HandshakeType>();
  prefix.body_bytes = in.get<uint16_t>();
  if (prefix.body_bytes > kMaxHandshakeBodyBytes || in.get<uint16_t>() != 0) {
    throw Error(ErrorCode::kProtocol, "a malformed handshake message");
  }
  return prefix;
}

HandshakeMessage parseHandshake(HandshakeType type, std::string_view body) {
  Reader in(body);
  HandshakeMessage message{.type = type};
  switch (type) {
    case HandshakeType::kHello:
      message.listener = in.get<uint64_t>();
      message.flags = in.get<uint16_t>();
      message.group = getAtMost(kMaxTextBytes, in);
      message.payload = getAtMost(kMaxPayloadBytes, in);
      break;
    case HandshakeType::kWelcome:
    case HandshakeType::kConfirm:
    case HandshakeType::kReady: message.payload = getAtMost(kMaxPayloadBytes, in); break;
    case HandshakeType::kRefusal: message.text = getAtMost(kMaxTextBytes, in); break;
    default: throw Error(ErrorCode::kProtocol, "a handshake message of an unknown type");
  }
  in.expectEnd();
  return message;
}

}  // namespace torchrpc::native
