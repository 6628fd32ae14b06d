// The handshake as a state machine, between an honest opener and listener whose messages pass through a relay that
// repeats, changes, swaps and makes messages, and does not know the secret; single messages, which unauthenticated
// peers send; and addresses, which are read from a store.

#include "input.h"
#include "transport/native/address.h"
#include "transport/native/auth/handshake_message.h"
#include "transport/native/auth/noise.h"

using namespace torchrpc;
using namespace torchrpc::native;

namespace {

void fuzzAddress(const std::string& bytes) {
  fuzz::expect(Address::parse(Address::parse(bytes).text()).text().size() < bytes.size() + 64);
}

HandshakeMessage parse(std::string_view bytes) {
  const auto prefix = HandshakePrefix::parse(bytes);
  fuzz::expect(prefix.body_bytes <= kMaxHandshakeBodyBytes);
  return parseHandshake(prefix.type, bytes.substr(kHandshakePrefixBytes));
}

void fuzzMessage(const std::string& bytes) {
  const auto message = parse(bytes);
  // The prologue covers the bytes of HELLO: a message that is read must be written again byte for byte.
  fuzz::expect(message.bytes().substr(kHandshakePrefixBytes) == bytes.substr(kHandshakePrefixBytes));
  if (message.type == HandshakeType::kRefusal) return;
  fuzz::expect(HandshakePayload::parse(message.payload).bytes() == message.payload);
}

/// One side, as HandshakeSession uses Noise.
class Party {
 public:
  Party(Side side, const SecretKey& psk, const HandshakeMessage& hello)
      : noise_(side, psk, hello.bytes() + "tcp", SecretKey(std::string(kKeyBytes, side == Side::kOpener ? 'o' : 'l'))) {
  }
  std::string write(const std::string& payload, bool tokens) {
    auto message = tokens ? noise_.writeTokens() : "";
    return message + noise_.sealPayload(payload);
  }
  bool read(std::string_view message, bool tokens) {
    if (tokens) noise_.readTokens(message);
    return noise_.openPayload(message).has_value();
  }

 private:
  NoiseHandshake noise_;
};

/// The four payloads, each of which the relay may replace. The next one is read only if the one before was authentic,
/// which it is only if the relay left it as it was.
void fuzzExchange(fuzz::Input& input) {
  HandshakeMessage offered{.flags = input.byte(), .listener = input.byte()}, arrived = offered;
  const uint8_t changes = input.byte();
  if (changes & 1) arrived.flags = input.byte();
  if (changes & 2) arrived.listener = input.byte();
  if (changes & 4) arrived.group = "other";
  const bool is_same = arrived.bytes() == offered.bytes();
  const SecretKey psk(std::string(kKeyBytes, 's'));
  Party opener(Side::kOpener, psk, offered), listener(Side::kListener, psk, arrived);
  std::vector<std::string> seen;
  bool is_honest = is_same;
  for (int i = 0; i < 4; ++i) {
    const bool tokens = i < 2;
    auto& from = i % 2 == 0 ? opener : listener;
    auto& to = i % 2 == 0 ? listener : opener;
    const auto sent = from.write(HandshakePayload{.name = "worker"}.bytes(), tokens);
    auto relayed = sent;
    switch (input.byte() % 6) {
      case 0: relayed[input.byte() % relayed.size()] ^= input.byte(); break;
      case 1: relayed.resize(input.byte() % (relayed.size() + 1)); break;
      case 2: relayed += static_cast<char>(input.byte()); break;
      case 3:
        if (!seen.empty()) relayed = seen[input.byte() % seen.size()];
        break;
      default: break;
    }
    seen.push_back(sent);
    is_honest = is_honest && relayed == sent;
    const bool is_authentic = to.read(relayed, tokens);
    fuzz::expect(is_authentic == is_honest);
    if (!is_authentic) return;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  initializeSodium();
  fuzz::Input input(data, size);
  const uint8_t what = input.byte() % 4;
  try {
    if (what == 1) {
      fuzzAddress(std::string(input.rest()));
    } else if (what == 2) {
      fuzzExchange(input);
    } else {
      fuzzMessage(std::string(input.rest()));
    }
  } catch (const Error& error) {
    fuzz::expectRefusal(error, what == 1);
  }
  return 0;
}
