#include "transport/native/auth/handshake_message.h"

#include <algorithm>

#include "base/error.h"
#include "transport/native/auth/proof.h"
#include "wire/codec.h"

namespace torchrpc::native {

namespace {

constexpr std::string_view kMagic = "torchrpc";
constexpr size_t kMaxTextBytes = 1024;

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

std::string HandshakeMessage::bytes() const {
  std::string body;
  Writer out(body);
  switch (type) {
    case HandshakeType::kHello:
      out.put(listener);
      out.put(flags);
      putShort(out, group, kMaxTextBytes);
      putShort(out, name, kMaxTextBytes);
      putShort(out, nonce, kNonceBytes);
      break;
    case HandshakeType::kChallenge:
      putShort(out, name, kMaxTextBytes);
      putShort(out, nonce, kNonceBytes);
      break;
    case HandshakeType::kAnswer: putShort(out, proof, kProofBytes); break;
    case HandshakeType::kWelcome:
      out.put(flags);
      putShort(out, name, kMaxTextBytes);
      putShort(out, proof, kProofBytes);
      break;
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
      message.name = getShort(in, kMaxTextBytes);
      message.nonce = getShort(in, kNonceBytes);
      break;
    case HandshakeType::kChallenge:
      message.name = getShort(in, kMaxTextBytes);
      message.nonce = getShort(in, kNonceBytes);
      break;
    case HandshakeType::kAnswer: message.proof = getShort(in, kProofBytes); break;
    case HandshakeType::kWelcome:
      message.flags = in.get<uint16_t>();
      message.name = getShort(in, kMaxTextBytes);
      message.proof = getShort(in, kProofBytes);
      break;
    case HandshakeType::kRefusal: message.text = getShort(in, kMaxTextBytes); break;
    default: throw Error(ErrorCode::kProtocol, "a handshake message of an unknown type");
  }
  in.expectEnd();
  return message;
}

}  // namespace torchrpc::native
