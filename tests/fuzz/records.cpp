// Records of an encrypted connection, as a relay that does not know the keys may send them: it repeats, drops, swaps,
// cuts and changes records of an honest peer, and makes some of its own. Whatever it does, only what the peer has sent
// is delivered, in order and from the start.

#include <cstring>
#include <random>
#include <sys/socket.h>

#include "input.h"
#include "transport/native/byte_stream.h"

using namespace torchrpc;
using namespace torchrpc::native;

namespace {

RecordKeys keysOf(Cipher cipher, bool opener, uint64_t records_per_key) {
  const SecretKey one(std::string(kKeyBytes, '1')), two(std::string(kKeyBytes, '2'));
  return {cipher, opener ? one : two, opener ? two : one, records_per_key};
}

/// The contents of the honest peer's records.
std::string plainOf(size_t record) { return std::string(1 + record * 7 % 40, static_cast<char>('a' + record % 26)); }

struct Sockets {
  Sockets() {
    int ends[2];
    fuzz::expect(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    here = Descriptor(ends[0]);
    there = Descriptor(ends[1]);
  }
  Descriptor here, there;
};

/// What an honest peer sends, record by record.
std::vector<std::string> sealedRecords(Cipher cipher, uint64_t records_per_key, size_t count) {
  Sockets sockets;
  const auto stream = makeSealedStream(std::move(sockets.here), keysOf(cipher, true, records_per_key));
  std::vector<std::string> records;
  const auto collect = [&] {
    char bytes[256];
    const auto got = ::recv(sockets.there.get(), bytes, sizeof(bytes), 0);
    fuzz::expect(got > 0);
    records.emplace_back(bytes, static_cast<size_t>(got));
  };
  for (size_t i = 0; i < count; ++i) {
    auto plain = plainOf(i);
    const iovec part{plain.data(), plain.size()};
    fuzz::expect(stream->write({&part, 1}) == static_cast<ssize_t>(plain.size()));
    collect();
  }
  stream->shutDown();
  collect();
  return records;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  initializeSodium();
  fuzz::Input input(data, size);
  const uint8_t setup = input.byte();
  const auto cipher = (setup & 1) && hasAes() ? Cipher::kAes256Gcm : Cipher::kChaCha20Poly1305;
  const uint64_t records_per_key = 1 + (setup >> 1) % 4;
  constexpr size_t kRecords = 12;
  const auto records = sealedRecords(cipher, records_per_key, kRecords);
  std::string all_plain;
  for (size_t i = 0; i < kRecords; ++i) all_plain += plainOf(i);

  // Steps: what the relay sends next.
  std::string sent;
  size_t next = 0;
  while (!input.rest().empty() && sent.size() < 16 << 10) {
    const uint8_t step = input.byte();
    std::string record = records[std::min(next, kRecords)];
    switch (step % 8) {
      case 0: next = input.byte() % records.size(); continue;                   // repeats, skips
      case 1: record.resize(input.byte() % (record.size() + 1)); break;         // cuts
      case 2: record[input.byte() % record.size()] ^= input.byte() | 1; break;  // changes
      case 3: {                                                                 // makes one
        record.assign(input.rest().substr(0, input.byte()));
        break;
      }
      default: ++next;
    }
    sent += record;
  }

  Sockets sockets;
  std::minstd_rand random(setup + 1);
  const auto stream = makeSealedStream(std::move(sockets.here), keysOf(cipher, false, records_per_key));
  std::string delivered;
  std::array<char, 64> room;
  std::string_view rest = sent;
  for (bool is_open = true; is_open;) {
    if (rest.empty()) ::shutdown(sockets.there.get(), SHUT_RDWR);
    const auto piece = std::min<size_t>(rest.size(), 1 + random() % 200);
    if (piece > 0)
      fuzz::expect(::send(sockets.there.get(), rest.data(), piece, MSG_NOSIGNAL) == static_cast<ssize_t>(piece));
    rest.remove_prefix(piece);
    for (;;) {
      const size_t first = random() % room.size(), bytes = 1 + random() % (room.size() - first);
      const iovec parts[] = {{room.data(), first}, {room.data() + first, bytes}};
      const auto read = stream->read(parts);
      if (read < 0) {
        fuzz::expect(!stream->readError(read).text().empty());
        is_open = false;
        break;
      }
      if (read == 0) break;
      delivered.append(room.data(), static_cast<size_t>(read));
    }
  }
  fuzz::expect(all_plain.starts_with(delivered));
  return 0;
}
