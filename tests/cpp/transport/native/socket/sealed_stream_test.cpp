// Sealed streams and their records: bytes of any size arrive, and whatever is changed on the way is noticed.

#include <catch2/catch.hpp>

#include <algorithm>
#include <fcntl.h>
#include <random>
#include <sys/socket.h>

#include "transport/native/auth/record_cipher.h"
#include "transport/native/byte_stream.h"

using namespace torchrpc;
using namespace torchrpc::native;

namespace {

RecordKeys keysOf(Cipher cipher, bool opener, uint64_t records_per_key = RecordCipher::kRecordsPerKey) {
  const SecretKey one(std::string(kKeyBytes, '1')), two(std::string(kKeyBytes, '2'));
  return {cipher, opener ? one : two, opener ? two : one, records_per_key};
}

/// Two non-blocking sockets that are connected.
struct SocketPair {
  SocketPair() {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    a = Descriptor(ends[0]);
    b = Descriptor(ends[1]);
  }
  Descriptor a, b;
};

/// The bytes of some records, as one side sends them.
std::string sealedBytes(const std::vector<std::string>& plain, Cipher cipher = Cipher::kChaCha20Poly1305) {
  SocketPair sockets;
  std::string sealed(1 << 20, '\0');
  size_t bytes = 0;
  const int there = sockets.b.get();
  const auto stream = makeSealedStream(std::move(sockets.a), keysOf(cipher, true));
  const auto collect = [&] {
    const auto got = ::recv(there, sealed.data() + bytes, sealed.size() - bytes, 0);
    if (got > 0) bytes += static_cast<size_t>(got);
  };
  for (const auto& each : plain) {
    const iovec part{const_cast<char*>(each.data()), each.size()};
    REQUIRE(stream->write({&part, 1}) == static_cast<ssize_t>(each.size()));
    collect();
  }
  stream->shutDown();
  collect();
  sealed.resize(bytes);
  return sealed;
}

struct Outcome {
  std::string plain;
  std::optional<Error> error;
};

/// What the other side delivers of such bytes, which arrive in pieces, and why it ends.
Outcome deliver(std::string_view sealed, size_t piece = 1 << 20, Cipher cipher = Cipher::kChaCha20Poly1305) {
  SocketPair sockets;
  const auto stream = makeSealedStream(std::move(sockets.b), keysOf(cipher, false));
  Outcome outcome;
  std::string room(100'000, '\0');
  for (;;) {
    if (sealed.empty()) {
      ::shutdown(sockets.a.get(), SHUT_RDWR);
    } else {
      const auto sent = ::send(sockets.a.get(), sealed.data(), std::min(piece, sealed.size()), MSG_NOSIGNAL);
      if (sent > 0) sealed.remove_prefix(static_cast<size_t>(sent));
    }
    for (;;) {
      const iovec part{room.data(), room.size()};
      const auto read = stream->read({&part, 1});
      if (read < 0) {
        outcome.error = stream->readError(read);
        return outcome;
      }
      if (read == 0) break;
      outcome.plain.append(room, 0, static_cast<size_t>(read));
    }
  }
}

std::string randomText(std::mt19937& random, size_t bytes) {
  std::string out(bytes, '\0');
  std::generate(out.begin(), out.end(), [&] { return static_cast<char>(random()); });
  return out;
}

/// Random pieces of `bytes`, from its begin, some of them empty; all of them together are not empty.
std::vector<iovec> randomParts(std::span<char> bytes, std::mt19937& random) {
  std::vector<iovec> parts;
  const size_t sizes[] = {0, 1, 16, 300, 5'000, 64 << 10, (64 << 10) + 1, 200'000};
  for (size_t i = 1 + random() % 8; i > 0; --i) {
    const auto size = std::min(bytes.size(), sizes[random() % std::size(sizes)]);
    parts.push_back({bytes.data(), size});
    bytes = bytes.subspan(size);
  }
  if (!bytes.empty()) parts.push_back({bytes.data(), 1});
  return parts;
}

}  // namespace

TEST_CASE("bytes go through a sealed stream in order, with writes and reads of any size") {
  initializeSodium();
  const auto cipher = GENERATE(Cipher::kChaCha20Poly1305, Cipher::kAes256Gcm);
  if (cipher == Cipher::kAes256Gcm && !hasAes()) return;
  const auto seed = GENERATE(range(0u, 6u));
  const auto records_per_key = GENERATE(uint64_t{1}, uint64_t{7}, RecordCipher::kRecordsPerKey);
  CAPTURE(seed, records_per_key);
  std::mt19937 random(seed);
  SocketPair sockets;
  const int small_buffer = 4'096;
  ::setsockopt(sockets.a.get(), SOL_SOCKET, SO_SNDBUF, &small_buffer, sizeof(small_buffer));
  const auto writer = makeSealedStream(std::move(sockets.a), keysOf(cipher, true, records_per_key));
  const auto reader = makeSealedStream(std::move(sockets.b), keysOf(cipher, false, records_per_key));
  auto sent = randomText(random, 3 << 20);
  std::string received(sent.size(), '\0');
  for (size_t written = 0, read = 0; read < sent.size();) {
    // As the contract says, what was not written is repeated, perhaps in other parts.
    const auto out = randomParts(std::span(sent).subspan(written), random);
    const auto more = writer->write(out);
    REQUIRE(more >= 0);
    written += static_cast<size_t>(more);
    const auto in = randomParts(std::span(received).subspan(read), random);
    const auto got = reader->read(in);
    REQUIRE(got >= 0);
    read += static_cast<size_t>(got);
    REQUIRE(read <= sent.size());
  }
  CHECK(received == sent);
  CHECK(reader->arm(WakeTarget::kLoop));
}

TEST_CASE("a stream keeps the loop informed of bytes that it has opened and that did not fit") {
  SocketPair sockets;
  const auto writer = makeSealedStream(std::move(sockets.a), keysOf(Cipher::kChaCha20Poly1305, true));
  const auto reader = makeSealedStream(std::move(sockets.b), keysOf(Cipher::kChaCha20Poly1305, false));
  std::string sent = "two records", received(sent.size(), '\0');
  for (size_t i = 0; i < 2; ++i) {
    const iovec part{sent.data() + 5 * i, i == 0 ? size_t{5} : sent.size() - 5};
    REQUIRE(writer->write({&part, 1}) > 0);
  }
  for (size_t i = 0; i < sent.size(); ++i) {
    const iovec part{received.data() + i, 1};
    REQUIRE(reader->read({&part, 1}) == 1);
    CHECK(reader->arm(WakeTarget::kLoop) == (i + 1 == sent.size()));
  }
  CHECK(received == sent);
}

TEST_CASE("the contents of a sealed stream cannot be found in its bytes") {
  const std::string marker = "a marker that must not be readable";
  const auto sealed = sealedBytes({marker, marker});
  CHECK(sealed.find(marker) == std::string::npos);
  CHECK(sealed.find("marker") == std::string::npos);
  // Equal records differ.
  const auto record = sizeof(RecordHeader) + marker.size() + kTagBytes;
  CHECK(sealed.substr(0, record) != sealed.substr(record, record));
}

TEST_CASE("a stream that its peer ends has an authenticated end, and one that was cut has not") {
  const auto sealed = sealedBytes({"first", "second"});
  const auto ended = deliver(sealed);
  CHECK(ended.plain == "firstsecond");
  CHECK(ended.error->code() == ErrorCode::kWorkerLost);
  CHECK_THAT(ended.error->text(), Catch::Contains("the peer closed the connection"));
  for (size_t end = 0; end < sealed.size(); ++end) {
    CAPTURE(end);
    const auto cut = deliver(sealed.substr(0, end));
    CHECK_THAT(cut.error->text(), Catch::Contains("no authenticated end"));
    CHECK(std::string("firstsecond").starts_with(cut.plain));
  }
}

TEST_CASE("bytes that arrive one at a time are delivered by whole records") {
  const auto outcome = deliver(sealedBytes({"first", "second"}), 1);
  CHECK(outcome.plain == "firstsecond");
}

TEST_CASE("a record of which any bit was changed is refused, and nothing of it is delivered") {
  initializeSodium();
  const auto cipher = GENERATE(Cipher::kChaCha20Poly1305, Cipher::kAes256Gcm);
  if (cipher == Cipher::kAes256Gcm && !hasAes()) return;
  const auto sealed = sealedBytes({"first", "second"}, cipher);
  const auto first = sizeof(RecordHeader) + 5 + kTagBytes, second = sizeof(RecordHeader) + 6 + kTagBytes;
  for (size_t bit = 0; bit < 8 * sealed.size(); ++bit) {
    CAPTURE(bit);
    auto changed = sealed;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
    const auto outcome = deliver(changed, 1 << 20, cipher);
    CHECK(outcome.plain == (bit / 8 < first ? "" : bit / 8 < first + second ? "first" : "firstsecond"));
    const auto text = outcome.error->text();
    // A greater size makes the reader wait for bytes that never come.
    const bool is_noticed =
        text.find("changed") != std::string::npos || text.find("no authenticated end") != std::string::npos;
    CHECK(is_noticed);
    if (bit / 8 % first >= sizeof(RecordHeader)) CHECK(outcome.error->code() == ErrorCode::kProtocol);
  }
}

TEST_CASE("records that are repeated, left out, swapped or sent back are refused") {
  const auto sealed = sealedBytes({"first", "other"});
  const auto size = sizeof(RecordHeader) + 5 + kTagBytes;
  const auto first = sealed.substr(0, size), second = sealed.substr(size, size), end = sealed.substr(2 * size);
  struct Attack {
    std::string bytes, delivered;
  };
  for (const auto& [bytes, delivered] :
       {Attack{first + first, "first"}, Attack{second, ""}, Attack{second + first, ""}, Attack{end, ""},
        Attack{first + end, "first"}}) {
    const auto outcome = deliver(bytes);
    CHECK(outcome.plain == delivered);
    CHECK(outcome.error->code() == ErrorCode::kProtocol);
    CHECK_THAT(outcome.error->text(), Catch::Contains("changed, repeated or removed on the way"));
  }
  // To the side that has sent them.
  SocketPair sockets;
  const auto sender = makeSealedStream(std::move(sockets.b), keysOf(Cipher::kChaCha20Poly1305, true));
  REQUIRE(::send(sockets.a.get(), first.data(), first.size(), 0) == static_cast<ssize_t>(first.size()));
  char room[100];
  const iovec part{room, sizeof(room)};
  CHECK(sender->read({&part, 1}) < 0);
}

TEST_CASE("the size of a record is bounded, and no record is empty") {
  for (const uint32_t bits : {0u, (64u << 10) + 1, 1u << 30, ~0u, (1u << 31) + 2}) {
    std::string bytes(reinterpret_cast<const char*>(&bits), sizeof(bits));
    const auto outcome = deliver(bytes);
    CHECK(outcome.error->code() == ErrorCode::kProtocol);
  }
}

TEST_CASE("both sides change the key after the same number of records") {
  initializeSodium();
  const auto cipher = GENERATE(Cipher::kChaCha20Poly1305, Cipher::kAes256Gcm);
  if (cipher == Cipher::kAes256Gcm && !hasAes()) return;
  const SecretKey key(std::string(kKeyBytes, 'k'));
  RecordCipher sealer(cipher, key, 3), opener(cipher, key, 3), stale(cipher, key, 1'000);
  const std::string plain = "plain";
  for (int i = 0; i < 10; ++i) {
    CAPTURE(i);
    std::string sealed(plain.size() + kTagBytes, '\0'), opened(plain.size(), '\0');
    const auto header = RecordHeader::data(plain.size());
    REQUIRE(sealer.seal(header, plain, sealed.data()));
    CHECK(stale.open(header, sealed, opened.data()) == (i < 3));
    REQUIRE(opener.open(header, sealed, opened.data()));
    CHECK(opened == plain);
  }
}

TEST_CASE("a record is opened in the place where it was sealed") {
  initializeSodium();
  const auto cipher = GENERATE(Cipher::kChaCha20Poly1305, Cipher::kAes256Gcm);
  if (cipher == Cipher::kAes256Gcm && !hasAes()) return;
  std::mt19937 random(1);
  const SecretKey key(std::string(kKeyBytes, 'k'));
  RecordCipher sealer(cipher, key), opener(cipher, key);
  for (const size_t bytes : {1, 15, 16, 17, 127, 128, 129, 1'000, 64 << 10}) {
    const auto plain = randomText(random, bytes);
    auto place = plain + std::string(kTagBytes, '\0');
    const auto header = RecordHeader::data(bytes);
    REQUIRE(sealer.seal(header, {place.data(), bytes}, place.data()));
    CHECK(place.substr(0, bytes) != plain);
    REQUIRE(opener.open(header, place, place.data()));
    CHECK(place.substr(0, bytes) == plain);
  }
}
