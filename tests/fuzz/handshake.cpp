// Greetings and addresses: what a stranger says first, and what a store that strangers can write to says of workers.

#include "input.h"
#include "transport/native_address.h"
#include "transport/native_handshake.h"

using namespace torchrpc;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const bool address = input.byte() & 1;
  const std::string bytes(input.rest());
  try {
    if (address) {
      fuzz::expect(NativeAddress::parse(NativeAddress::parse(bytes).text()).text().size() < bytes.size() + 64);
      return 0;
    }
    const auto prefix = GreetingPrefix::parse(bytes);
    fuzz::expect(prefix.body_bytes <= kGreetingBodyBytes);
    const auto greeting = parseGreeting(prefix.type, std::string_view(bytes).substr(kGreetingPrefixBytes));
    // A proof is made over the greetings as they are written: what is read must be written again byte for byte.
    const auto again = greeting.bytes();
    fuzz::expect(again.substr(kGreetingPrefixBytes) == bytes.substr(kGreetingPrefixBytes));
  } catch (const Error& error) {
    fuzz::expectRefusal(error, address);
  }
  return 0;
}
