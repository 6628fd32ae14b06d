// Handshake messages, which unauthenticated peers send, and addresses, which are read from a store.

#include "input.h"
#include "transport/native/address.h"
#include "transport/native/auth/handshake_message.h"

using namespace torchrpc;
using namespace torchrpc::native;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const bool address = input.byte() & 1;
  const std::string bytes(input.rest());
  try {
    if (address) {
      fuzz::expect(Address::parse(Address::parse(bytes).text()).text().size() < bytes.size() + 64);
      return 0;
    }
    const auto prefix = HandshakePrefix::parse(bytes);
    fuzz::expect(prefix.body_bytes <= kMaxHandshakeBodyBytes);
    const auto message = parseHandshake(prefix.type, std::string_view(bytes).substr(kHandshakePrefixBytes));
    // A proof covers the bytes of the handshake messages: a message that is read must be written again byte for byte.
    const auto again = message.bytes();
    fuzz::expect(again.substr(kHandshakePrefixBytes) == bytes.substr(kHandshakePrefixBytes));
  } catch (const Error& error) {
    fuzz::expectRefusal(error, address);
  }
  return 0;
}
