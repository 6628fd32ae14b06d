// Bytes of the native transport, valid and random ones: handshake messages, frames in pieces of any size, rings.

#include <algorithm>
#include <array>
#include <cstring>
#include <fcntl.h>
#include <numeric>
#include <random>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/frame_memory.h"
#include "transport/native/auth/handshake_message.h"
#include "transport/native/byte_stream.h"
#include "transport/native/frame_stream.h"
#include "transport/native/shm/ring.h"
#include "transport/witness.h"
#include "wire/tensor_codec.h"

using namespace torchrpc;
using namespace torchrpc::native;
using namespace torchrpc::test;

namespace {

HandshakeMessage parsed(const std::string& bytes) {
  const auto prefix = HandshakePrefix::parse(bytes);
  return parseHandshake(prefix.type, std::string_view(bytes).substr(kHandshakePrefixBytes));
}

/// Bytes that are no handshake message must cause a protocol error and nothing else.
bool isHandshakeMessage(const std::string& bytes) {
  try {
    parsed(bytes);
    return true;
  } catch (const Error& error) {
    REQUIRE(error.code() == ErrorCode::kProtocol);
    return false;
  }
}

HandshakeMessage someHello() {
  return {.flags = 1, .listener = 42, .group = std::string("g\0roup", 6), .payload = "p"};
}

/// All bytes of the queue, written in pieces of random size.
std::string drain(FrameQueue& queue, std::mt19937& random, FrameQueue::Sent& sent) {
  std::string bytes;
  std::array<iovec, 5> parts;
  while (!queue.empty()) {
    const auto count = queue.gather(parts);
    REQUIRE(count > 0);
    size_t all = 0;
    for (size_t i = 0; i < count; ++i) all += parts[i].iov_len;
    const size_t written = 1 + random() % all;
    for (size_t i = 0, rest = written; rest > 0; ++i) {
      const auto some = std::min(rest, parts[i].iov_len);
      bytes.append(static_cast<const char*>(parts[i].iov_base), some);
      rest -= some;
    }
    queue.advance(written, sent);
  }
  return bytes;
}

/// Passes `bytes` to the reader in pieces of random size. Returns the reader's error, if there is one.
Status feed(FrameReader& reader, std::string_view bytes, std::mt19937& random, std::vector<Frame>& frames) {
  const auto stream = makeSocketStream(Descriptor());
  std::array<char, 100> scratch;
  std::array<iovec, 6> parts;
  while (!bytes.empty()) {
    const auto count = reader.room(scratch, parts);
    size_t room = 0;
    for (size_t i = 0; i < count; ++i) room += parts[i].iov_len;
    const size_t read = std::min<size_t>(bytes.size(), 1 + random() % room);
    for (size_t i = 0, rest = read; rest > 0; ++i) {
      const auto some = std::min(rest, parts[i].iov_len);
      std::memcpy(parts[i].iov_base, bytes.data(), some);
      bytes.remove_prefix(some);
      rest -= some;
    }
    auto refused = reader.take(read, scratch, *stream, [&](Frame frame) {
      frames.push_back(std::move(frame));
      return true;
    });
    if (refused) return refused;
  }
  return std::nullopt;
}

Frame randomFrame(std::mt19937& random) {
  const size_t sizes[] = {0, 1, 7, 99, 100, 101, 1'000};
  Frame frame{std::string(sizes[random() % 7], static_cast<char>(random())), {}};
  for (size_t i = random() % 4; i > 0; --i) {
    frame.segments.push_back(filled(sizes[random() % 7], static_cast<char>(random())));
  }
  return frame;
}

bool isSame(const Frame& a, const Frame& b) {
  return a.head == b.head &&
      std::equal(a.segments.begin(), a.segments.end(), b.segments.begin(), b.segments.end(), [](auto& x, auto& y) {
           return x.bytes == y.bytes && (x.bytes == 0 || std::memcmp(x.data(), y.data(), x.bytes) == 0);
         });
}

}  // namespace

// ---- announced frames ----

TEST_CASE("a large frame is announced when its head has begun, and if it is refused only that beginning is kept") {
  std::mt19937 random(11);
  const bool is_refused = GENERATE(false, true);
  std::vector<std::pair<std::string, uint64_t>> announced;
  Limits limits;
  FrameReader reader(limits, [&](std::string_view head_begin, uint64_t bytes) -> Status {
    announced.emplace_back(head_begin, bytes);
    if (!is_refused) return std::nullopt;
    return Error(ErrorCode::kQuotaExceeded, "too many bytes");
  });
  std::vector<Frame> sent;
  sent.push_back({std::string(100, 'a'), {}});
  sent.push_back({std::string(kMinAnnouncedBytes, 'b'), {}});
  sent.push_back({std::string(10, 'c'), {}});
  sent.back().segments.push_back(filled(3 * kMinAnnouncedBytes, 'd'));
  sent.push_back({"", {}});
  sent.back().segments.push_back(filled(kMinAnnouncedBytes, 'e'));
  sent.push_back({std::string(kMinAnnouncedBytes - 1, 'f'), {}});
  FrameQueue queue;
  for (const auto& frame : sent) queue.push(FrameQueue::Outgoing(frame, {}));
  FrameQueue::Sent written;
  std::vector<Frame> frames;
  REQUIRE_FALSE(feed(reader, drain(queue, random, written), random, frames));
  CHECK(
      announced ==
      std::vector<std::pair<std::string, uint64_t>>{
          {std::string(64, 'b'), kMinAnnouncedBytes},
          {std::string(10, 'c'), 3 * kMinAnnouncedBytes + 10},
          {"", kMinAnnouncedBytes}});
  REQUIRE(frames.size() == sent.size());
  for (const size_t i : {0, 4}) CHECK(isSame(frames[i], sent[i]));
  for (const size_t i : {1, 2, 3}) {
    if (!is_refused) {
      CHECK(isSame(frames[i], sent[i]));
      continue;
    }
    CHECK(frames[i].head == announced[i - 1].first);
    CHECK(frames[i].segments.empty());
    REQUIRE(frames[i].failure);
    CHECK(frames[i].failure->code() == ErrorCode::kQuotaExceeded);
  }
}

// ---- handshake messages ----

TEST_CASE("a handshake message can be parsed from its bytes") {
  const auto hello = parsed(someHello().bytes());
  CHECK(hello.type == HandshakeType::kHello);
  CHECK(hello.listener == 42);
  CHECK(hello.flags == 1);
  CHECK(hello.group == std::string("g\0roup", 6));
  CHECK(hello.payload == "p");
  for (const auto type : {HandshakeType::kWelcome, HandshakeType::kConfirm, HandshakeType::kReady}) {
    const auto message = parsed(HandshakeMessage{.type = type, .payload = "q"}.bytes());
    CHECK(message.type == type);
    CHECK(message.payload == "q");
  }
  CHECK(parsed(HandshakeMessage{.type = HandshakeType::kRefusal, .text = "no"}.bytes()).text == "no");
}

TEST_CASE("the payload of a handshake message can be parsed from its bytes") {
  const HandshakePayload payload{.flags = 5, .name = "alice", .encryption = "auto", .identity = std::string(2048, 'i')};
  const auto again = HandshakePayload::parse(payload.bytes());
  CHECK(again.flags == 5);
  CHECK(again.name == "alice");
  CHECK(again.encryption == "auto");
  CHECK(again.identity == payload.identity);
  CHECK_THROWS_AS(HandshakePayload::parse(payload.bytes() + "x"), Error);
  CHECK_THROWS_AS(HandshakePayload::parse(HandshakePayload{.flags = 1 << 15}.bytes()), Error);
}

TEST_CASE("a handshake message is never larger than its limit") {
  const std::string huge(100'000, 'x');
  const auto bytes = HandshakeMessage{.group = huge, .payload = huge}.bytes();
  CHECK(bytes.size() <= kHandshakePrefixBytes + kMaxHandshakeBodyBytes);
  CHECK(isHandshakeMessage(bytes));
}

TEST_CASE("the body of a handshake message may be as large as its limit, and no larger") {
  const auto announced = [](uint16_t body_bytes) {
    auto bytes = someHello().bytes();
    std::memcpy(bytes.data() + kHandshakePrefixBytes - 4, &body_bytes, sizeof(body_bytes));
    return HandshakePrefix::parse(bytes).body_bytes;
  };
  CHECK(announced(kMaxHandshakeBodyBytes) == kMaxHandshakeBodyBytes);
  CHECK_THROWS_AS(announced(kMaxHandshakeBodyBytes + 1), Error);
}

TEST_CASE("the error for another version of the protocol names that version") {
  auto bytes = someHello().bytes();
  bytes[8] = 77;
  try {
    parsed(bytes);
    FAIL("parsed");
  } catch (const Error& error) {
    CHECK_THAT(error.text(), Catch::Contains("version 77") && Catch::Contains("same torchrpc"));
  }
}

TEST_CASE("bytes that are no handshake message are an error") {
  const auto seed = GENERATE(1u, 2u, 3u);
  CAPTURE(seed);
  std::mt19937 random(seed);
  const std::string whole = someHello().bytes();
  for (size_t end = 0; end < whole.size(); ++end) CHECK_FALSE(isHandshakeMessage(whole.substr(0, end)));
  CHECK_FALSE(isHandshakeMessage(whole + "x"));
  for (int i = 0; i < 20'000; ++i) {
    auto bytes = whole;
    for (size_t flips = 1 + random() % 4; flips > 0; --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    isHandshakeMessage(bytes);
    std::string noise(random() % 200, '\0');
    std::generate(noise.begin(), noise.end(), [&] { return static_cast<char>(random()); });
    CHECK_FALSE(isHandshakeMessage(noise));
  }
}

// ---- frames ----

TEST_CASE("frames cut into pieces of any size arrive whole and in order") {
  const auto seed = GENERATE(range(0u, 20u));
  CAPTURE(seed);
  std::mt19937 random(seed);
  std::vector<Frame> sent;
  FrameQueue queue;
  for (int i = 0; i < 50; ++i) {
    sent.push_back(randomFrame(random));
    queue.push({sent.back(), nullptr});
  }
  FrameQueue::Sent written;
  const auto bytes = drain(queue, random, written);
  CHECK(written.size() == 50);
  const Limits limits;
  FrameReader reader(limits);
  std::vector<Frame> received;
  REQUIRE_FALSE(feed(reader, bytes, random, received));
  REQUIRE(received.size() == 50);
  for (int i = 0; i < 50; ++i) CHECK(isSame(received[i], sent[i]));
}

TEST_CASE("small frames that are queued are written together") {
  FrameQueue queue;
  for (int i = 0; i < 20; ++i) queue.push({headOnly("frame"), nullptr});
  std::array<iovec, 64> parts;
  const auto count = queue.gather(parts);
  CHECK(count == 40);  // a header and a head each
  FrameQueue::Sent sent;
  queue.advance(20 * (sizeof(FrameHeader) + 5), sent);
  CHECK(sent.size() == 20);
  CHECK(queue.empty());
}

TEST_CASE("random bytes instead of frames end in an error or wait for more, within the limits") {
  const auto seed = GENERATE(range(0u, 5u));
  CAPTURE(seed);
  std::mt19937 random(seed);
  Limits limits;
  limits.head_bytes = 10'000;
  limits.segment_bytes = 10'000;
  limits.tensors = 10;
  for (int i = 0; i < 1'000; ++i) {
    FrameReader reader(limits);
    std::string noise(1 + random() % 300, '\0');
    std::generate(noise.begin(), noise.end(), [&] { return static_cast<char>(random() % 3 ? 0 : random()); });
    std::vector<Frame> frames;
    if (const auto error = feed(reader, noise, random, frames)) {
      const bool expected = error->code() == ErrorCode::kProtocol || error->code() == ErrorCode::kFrameTooLarge;
      CHECK(expected);
    }
    for (const auto& frame : frames) CHECK(frame.head.size() <= limits.head_bytes);
  }
}

TEST_CASE("a frame with tensors in shared memory is refused on a connection without shared memory") {
  std::mt19937 random(1);
  FrameHeader header{.head_bytes = 0, .segments = 1, .flags = FrameHeader::kSlabOffsets};
  const uint64_t layout[] = {100, 0};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(reinterpret_cast<const char*>(layout), sizeof(layout));
  const Limits limits;
  FrameReader reader(limits);
  std::vector<Frame> frames;
  const auto error = feed(reader, bytes, random, frames);
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kProtocol);
  CHECK_THAT(error->text(), Catch::Contains("none is shared"));
  CHECK(frames.empty());
}

TEST_CASE("a tensor for which there is no memory costs its frame, and not those that follow") {
  constexpr size_t kMoreThanTheAddressSpace = size_t{1} << 47, kScratchBytes = size_t{1} << 36;
  const Limits limits{.segment_bytes = kMoreThanTheAddressSpace, .frame_bytes = 2 * kMoreThanTheAddressSpace};
  FrameReader reader(limits);
  const FrameHeader header{.head_bytes = 4, .segments = 2, .flags = 0};
  const uint64_t layout[] = {5000, kMoreThanTheAddressSpace};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(reinterpret_cast<const char*>(layout), sizeof(layout));
  bytes += "head";
  std::mt19937 random(1);
  std::vector<Frame> frames;
  CHECK_FALSE(feed(reader, bytes, random, frames));
  // Memory that is never touched stands for the bytes of the tensors.
  void* untouched = ::mmap(nullptr, kScratchBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(untouched != MAP_FAILED);
  const std::span<char> scratch(static_cast<char*>(untouched), kScratchBytes);
  const auto stream = makeSocketStream({});
  for (size_t left = layout[0] + layout[1]; left > 0;) {
    std::array<iovec, 8> parts;
    REQUIRE(reader.room(scratch, parts) == 1);
    const auto read = std::min(left, parts[0].iov_len);
    left -= read;
    CHECK_FALSE(reader.take(read, scratch, *stream, [&](Frame&& frame) {
      frames.push_back(std::move(frame));
      return true;
    }));
  }
  ::munmap(untouched, kScratchBytes);
  REQUIRE(frames.size() == 1);
  CHECK(frames[0].head == "head");
  REQUIRE(frames[0].failure);
  CHECK_THAT(frames[0].failure->text(), Catch::Contains("no memory"));
  const FrameHeader next{.head_bytes = 4, .segments = 0, .flags = 0};
  CHECK_FALSE(feed(reader, std::string(reinterpret_cast<const char*>(&next), sizeof(next)) + "next", random, frames));
  REQUIRE(frames.size() == 2);
  CHECK(frames[1].head == "next");
  CHECK_FALSE(frames[1].failure);
}

TEST_CASE("the slabs of a message for which there is no memory are returned") {
  struct Leasing final : ByteStream {
    std::vector<uint64_t> leased;
    ssize_t write(std::span<const iovec>) override { return 0; }
    Room requestRoom() override { return Room::kNow; }
    ssize_t read(std::span<const iovec>) override { return 0; }
    Segment leaseFromSlab(uint64_t slab_offset, size_t bytes) override {
      leased.push_back(slab_offset);
      return {makeStorage(bytes), 0, bytes};
    }
    bool ready() override { return false; }
    void shutDown() override {}
  } stream;
  constexpr uint64_t kMoreThanTheAddressSpace = uint64_t{1} << 47;
  const Limits limits{.segment_bytes = kMoreThanTheAddressSpace, .frame_bytes = 2 * kMoreThanTheAddressSpace};
  FrameReader reader(limits);
  const FrameHeader header{.head_bytes = 4, .segments = 3, .flags = FrameHeader::kSlabOffsets};
  const uint64_t layout[] = {8, kMoreThanTheAddressSpace, 8, 64, FrameHeader::kInStream, 128};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(reinterpret_cast<const char*>(layout), sizeof(layout));
  std::vector<char> scratch(bytes.begin(), bytes.end());
  std::array<iovec, 8> parts;
  CHECK(reader.room(scratch, parts) == 1);
  CHECK_FALSE(reader.take(bytes.size(), scratch, stream, [](const Frame&) { return true; }));
  CHECK(stream.leased == std::vector<uint64_t>{64, 128});
}

namespace {

constexpr size_t kMegabyte = 1 << 20;

/// The bytes with which a frame begins.
std::string announced(const FrameHeader& header, const std::vector<uint64_t>& layout) {
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  return bytes.append(reinterpret_cast<const char*>(layout.data()), layout.size() * sizeof(uint64_t));
}

/// The number of bytes and of parts for which the reader has memory now.
std::pair<size_t, size_t> roomOf(const FrameReader& reader) {
  std::vector<iovec> parts(1 << 17);
  std::array<char, 100> scratch;
  const auto count = reader.room(scratch, parts);
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += parts[i].iov_len;
  return {bytes, count};
}

}  // namespace

TEST_CASE("a head that is announced gets memory as it arrives") {
  std::mt19937 random(1);
  const Limits limits;
  FrameReader reader(limits);
  std::vector<Frame> frames;
  REQUIRE_FALSE(feed(reader, announced({.head_bytes = limits.head_bytes}, {}), random, frames));
  CHECK(reader.missing() == limits.head_bytes);
  CHECK(roomOf(reader).first <= kMegabyte + 100);
  const std::string some(3 * kMegabyte, 'x');
  REQUIRE_FALSE(feed(reader, some, random, frames));
  CHECK(reader.missing() == limits.head_bytes - some.size());
  CHECK(roomOf(reader).first <= kMegabyte + 100);
}

TEST_CASE("the list of sizes gets memory as it arrives") {
  std::mt19937 random(1);
  const Limits limits;
  FrameReader reader(limits);
  std::vector<Frame> frames;
  REQUIRE_FALSE(feed(reader, announced({.segments = limits.tensors}, {}), random, frames));
  CHECK(roomOf(reader).first <= kMegabyte);
}

TEST_CASE("segments that are announced get memory when those before them have arrived") {
  std::mt19937 random(1);
  const Limits limits;
  FrameReader reader(limits);
  std::vector<Frame> frames;
  const std::vector<uint64_t> layout(100'000, kMegabyte);
  const FrameHeader header{.head_bytes = 4, .segments = static_cast<uint32_t>(layout.size())};
  REQUIRE_FALSE(feed(reader, announced(header, layout) + "head", random, frames));
  CHECK(roomOf(reader).first <= 32 * kMegabyte);
  CHECK(roomOf(reader).second <= 300);
  CHECK(reader.missing() == layout.size() * kMegabyte);
}

TEST_CASE("segments whose sum is more than the limit, or overflows, are refused before any memory is allocated") {
  std::mt19937 random(1);
  constexpr auto kMost = ~uint64_t{0};
  const Limits usual, none{.head_bytes = kMost, .segment_bytes = kMost, .frame_bytes = kMost};
  const std::pair<Limits, std::vector<uint64_t>> cases[] = {
      {usual, std::vector<uint64_t>(1'000, usual.segment_bytes)},
      {usual, {usual.segment_bytes - 1, 2}},
      {none, {kMost, kMost}},
      {none, {kMost / 2, kMost / 2 + 2}}};
  for (const auto& [limits, layout] : cases) {
    FrameReader reader(limits);
    std::vector<Frame> frames;
    const FrameHeader header{.head_bytes = 4, .segments = static_cast<uint32_t>(layout.size())};
    const auto error = feed(reader, announced(header, layout) + "head", random, frames);
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kFrameTooLarge);
    CHECK_THAT(error->text(), Catch::Contains("all its parts"));
  }
}

TEST_CASE("frames that get their memory in steps arrive whole") {
  std::mt19937 random(7);
  std::vector<Frame> sent;
  sent.push_back(headOnly(std::string(5 * kMegabyte + 3, 'a')));
  sent.push_back(
      {std::string(2 * kMegabyte, 'b'), {filled(40 * kMegabyte, 1), filled(1, 2), filled(20 * kMegabyte, 3)}});
  Frame many{"many", {}};
  for (int i = 0; i < 40'000; ++i) many.segments.push_back(filled(i % 3, static_cast<char>(i)));
  sent.push_back(std::move(many));
  sent.push_back({"", {filled(0, 0), filled(17 * kMegabyte, 5), filled(0, 0), filled(100, 6)}});
  sent.push_back(headOnly("last"));
  std::string bytes;
  for (const auto& frame : sent) {
    FrameQueue queue;
    queue.push({frame, nullptr});
    FrameQueue::Sent written;
    bytes += drain(queue, random, written);
  }
  const Limits limits;
  FrameReader reader(limits);
  std::vector<Frame> received;
  REQUIRE_FALSE(feed(reader, bytes, random, received));
  REQUIRE(received.size() == sent.size());
  for (size_t i = 0; i < sent.size(); ++i) CHECK(isSame(received[i], sent[i]));
  CHECK(reader.missing() == 0);
}

TEST_CASE("a message with more bytes than the limit for all its parts is refused where it is sent") {
  const Limits limits{.frame_bytes = 1'000};
  CHECK_FALSE(checkFrame({"head", {filled(400, 1), filled(500, 1)}}, limits));
  const auto error = checkFrame({"head", {filled(500, 1), filled(500, 1)}}, limits);
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kFrameTooLarge);
}

// ---- rings ----

TEST_CASE("bytes go through a ring in order, with writes and reads of any size") {
  const auto seed = GENERATE(range(0u, 5u));
  CAPTURE(seed);
  std::mt19937 random(seed);
  const auto memory = RingMemory::make();
  const RingMemory here(memory), there(memory);
  RingEnd writer(RingEnd::Side::kWriter, here.control(0), here.ring(0));
  RingEnd reader(RingEnd::Side::kReader, there.control(0), there.ring(0));
  std::string sent(3 << 20, '\0'), received;
  std::generate(sent.begin(), sent.end(), [&] { return static_cast<char>(random()); });
  std::string piece(200'000, '\0');
  for (size_t at = 0; received.size() < sent.size();) {
    const size_t bytes = std::min<size_t>(sent.size() - at, random() % 200'000);
    const iovec out[] = {{sent.data() + at, bytes / 2}, {sent.data() + at + bytes / 2, bytes - bytes / 2}};
    const auto written = writer.move(out, 0);
    REQUIRE(written >= 0);
    at += static_cast<size_t>(written);
    const iovec in[] = {{piece.data(), random() % piece.size()}};
    const auto read = reader.move(in, 0);
    REQUIRE(read >= 0);
    received.append(piece, 0, static_cast<size_t>(read));
  }
  CHECK(received == sent);
}

TEST_CASE("impossible positions of a peer are detected") {
  const auto memory = RingMemory::make();
  const RingMemory rings(memory);
  RingEnd writer(RingEnd::Side::kWriter, rings.control(0), rings.ring(0));
  RingEnd reader(RingEnd::Side::kReader, rings.control(1), rings.ring(1));
  rings.control(0).read = 1;
  CHECK(writer.available() < 0);
  rings.control(1).written = uint64_t{1} << 40;
  CHECK(reader.available() < 0);
  const iovec part{nullptr, 0};
  CHECK(reader.move({&part, 1}, 0) < 0);
}

TEST_CASE("memory that a peer could shrink, or that is not made for rings, is refused") {
  Descriptor unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(unsealed.get(), ::lseek(RingMemory::make().get(), 0, SEEK_END)) == 0);
  CHECK_THROWS_AS(RingMemory(unsealed), Error);
  REQUIRE(::fcntl(unsealed.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  CHECK_NOTHROW(RingMemory(unsealed));
  Descriptor odd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(odd.get(), 5'000) == 0);
  REQUIRE(::fcntl(odd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  CHECK_THROWS_AS(RingMemory(odd), Error);
  CHECK_THROWS_AS(RingMemory(Descriptor(::open("/dev/null", O_RDWR | O_CLOEXEC))), Error);
}

TEST_CASE("an empty ring is written from its begin, so that small messages use few pages") {
  const auto memory = RingMemory::make();
  const RingMemory rings(memory);
  RingEnd writer(RingEnd::Side::kWriter, rings.control(0), rings.ring(0));
  RingEnd reader(RingEnd::Side::kReader, rings.control(0), rings.ring(0));
  std::string in(100, '\0');
  const iovec room{in.data(), in.size()};
  for (int i = 0; i < 100; ++i) {
    std::string out(100, static_cast<char>(i));
    const iovec part{out.data(), out.size()};
    REQUIRE(writer.move({&part, 1}, 0) == 100);
    CHECK(std::memcmp(rings.ring(0).data(), out.data(), out.size()) == 0);
    REQUIRE(reader.move({&room, 1}, 0) == 100);
    CHECK(in == out);
  }
}

TEST_CASE("no begin that a peer claims for the ring makes the reader leave the ring") {
  const auto memory = RingMemory::make();
  const RingMemory rings(memory);
  const auto bytes = rings.ring(0);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i % 251);
  RingEnd reader(RingEnd::Side::kReader, rings.control(0), bytes);
  rings.control(0).written = 100;
  const uint64_t begin = GENERATE(uint64_t{0}, uint64_t{12'345}, uint64_t{50}, ~uint64_t{0}, uint64_t{1} << 63);
  rings.control(0).begin = begin;
  CHECK(reader.available() == 100);
  std::string in(100, '\0');
  const iovec room{in.data(), in.size()};
  REQUIRE(reader.move({&room, 1}, 0) == 100);
  for (size_t i = 0; i < in.size(); ++i) CHECK(in[i] == bytes[(i - begin) % bytes.size()]);
}
