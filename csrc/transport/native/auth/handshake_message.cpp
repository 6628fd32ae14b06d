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

void putShort(Writer& out, std::string_view text, size_t limit) {
  text = text.substr(0, limit);
  out.put(static_cast<uint16_t>(text.size()));
  out.putBytes(text.data(), text.size());
}

std::string getShort(Reader& in, size_t limit) {
  const auto bytes = in.get<uint16_t>();
  if (bytes > limit) throw Error(ErrorCode::kProtocol, "a handshake message with a field that is too long");
  return std::string(in.getBytes(bytes));
}

}  // namespace

std::string HandshakePayload::bytes() const {
  std::string bytes;
  Writer out(bytes);
  out.put(flags);
  putShort(out, name, kMaxTextBytes);
  putShort(out, encryption, kMaxSettingBytes);
  putShort(out, identity, kMaxIdentityBytes);
  return bytes;
}

HandshakePayload HandshakePayload::parse(std::string_view bytes) {
  Reader in(bytes);
  HandshakePayload payload;
  payload.flags = in.get<uint16_t>();
  payload.name = getShort(in, kMaxTextBytes);
  payload.encryption = getShort(in, kMaxSettingBytes);
  payload.identity = getShort(in, kMaxIdentityBytes);
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
      putShort(out, group, kMaxTextBytes);
      putShort(out, payload, kMaxPayloadBytes);
      break;
    case HandshakeType::kWelcome:
    case HandshakeType::kConfirm:
    case HandshakeType::kReady: putShort(out, payload, kMaxPayloadBytes); break;
    case HandshakeType::kRefusal: putShort(out, text, kMaxTextBytes); break;
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
      message.group = getShort(in, kMaxTextBytes);
      message.payload = getShort(in, kMaxPayloadBytes);
      break;
    case HandshakeType::kWelcome:
    case HandshakeType::kConfirm:
    case HandshakeType::kReady: message.payload = getShort(in, kMaxPayloadBytes); break;
    case HandshakeType::kRefusal: message.text = getShort(in, kMaxTextBytes); break;
    default: throw Error(ErrorCode::kProtocol, "a handshake message of an unknown type");
  }
  in.expectEnd();
  return message;
}

}  // namespace torchrpc::native
