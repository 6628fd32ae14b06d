#include "transport/native_handshake.h"

#include <algorithm>

#include "base/error.h"
#include "transport/native_proof.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

constexpr std::string_view kMagic = "torchrpc";
constexpr size_t kNameBytes = 1024;

void putShort(Writer& out, std::string_view text, size_t limit) {
  text = text.substr(0, limit);
  out.put(static_cast<uint16_t>(text.size()));
  out.putBytes(text.data(), text.size());
}

std::string getShort(Reader& in, size_t limit) {
  const auto bytes = in.get<uint16_t>();
  if (bytes > limit) throw Error(ErrorCode::kProtocol, "a greeting with a part that is too long");
  return std::string(in.getBytes(bytes));
}

}  // namespace

std::string Greeting::bytes() const {
  std::string body;
  Writer out(body);
  switch (type) {
    case GreetingType::kHello:
      out.put(listener);
      out.put(flags);
      putShort(out, group, kNameBytes);
      putShort(out, name, kNameBytes);
      putShort(out, nonce, kNonceBytes);
      break;
    case GreetingType::kChallenge:
      putShort(out, name, kNameBytes);
      putShort(out, nonce, kNonceBytes);
      break;
    case GreetingType::kAnswer: putShort(out, proof, kProofBytes); break;
    case GreetingType::kWelcome:
      out.put(flags);
      putShort(out, name, kNameBytes);
      putShort(out, proof, kProofBytes);
      break;
    case GreetingType::kRefusal: putShort(out, text, kNameBytes); break;
  }
  std::string message(kMagic);
  Writer prefix(message);
  prefix.put(kNativeVersion);
  prefix.put(type);
  prefix.put(static_cast<uint16_t>(body.size()));
  prefix.put(uint16_t{0});
  return message + body;
}

bool GreetingPrefix::isOurs(std::string_view bytes) { return bytes.starts_with(kMagic); }

GreetingPrefix GreetingPrefix::parse(std::string_view bytes) {
  Reader in(bytes);
  if (!isOurs(in.getBytes(kMagic.size()))) throw Error(ErrorCode::kProtocol, "what came is not torchrpc's protocol");
  if (const auto version = in.get<uint16_t>(); version != kNativeVersion) {
    throw Error(
        ErrorCode::kProtocol,
        "it speaks version " + std::to_string(version) + " of the native transport's protocol, this worker version " +
            std::to_string(kNativeVersion) + ": install the same torchrpc on all workers");
  }
  GreetingPrefix prefix;
  prefix.type = in.get<GreetingType>();
  prefix.body_bytes = in.get<uint16_t>();
  if (prefix.body_bytes > kGreetingBodyBytes || in.get<uint16_t>() != 0) {
    throw Error(ErrorCode::kProtocol, "a malformed greeting");
  }
  return prefix;
}

Greeting parseGreeting(GreetingType type, std::string_view body) {
  Reader in(body);
  Greeting greeting{.type = type};
  switch (type) {
    case GreetingType::kHello:
      greeting.listener = in.get<uint64_t>();
      greeting.flags = in.get<uint16_t>();
      greeting.group = getShort(in, kNameBytes);
      greeting.name = getShort(in, kNameBytes);
      greeting.nonce = getShort(in, kNonceBytes);
      break;
    case GreetingType::kChallenge:
      greeting.name = getShort(in, kNameBytes);
      greeting.nonce = getShort(in, kNonceBytes);
      break;
    case GreetingType::kAnswer: greeting.proof = getShort(in, kProofBytes); break;
    case GreetingType::kWelcome:
      greeting.flags = in.get<uint16_t>();
      greeting.name = getShort(in, kNameBytes);
      greeting.proof = getShort(in, kProofBytes);
      break;
    case GreetingType::kRefusal: greeting.text = getShort(in, kNameBytes); break;
    default: throw Error(ErrorCode::kProtocol, "a greeting of a type that does not exist");
  }
  in.expectEnd();
  return greeting;
}

}  // namespace torchrpc
