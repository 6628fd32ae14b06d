// Blocks in shared memory: where tensors stand, when their memory is used again, and what forks make of it.

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "transport/native/byte_stream.h"
#include "transport/native/frame_stream.h"
#include "transport/native/shm/ring.h"
#include "transport/witness.h"

using namespace torchrpc;
using namespace torchrpc::native;
using namespace torchrpc::test;

namespace {

constexpr size_t kUnit = SlabControl::kUnitBytes;
constexpr size_t kMiB = 1 << 20;

/// Writer and reader of the same memory, each at addresses of its own.
struct Shared {
  Descriptor memory = RingMemory::make();
  std::shared_ptr<const RingMemory> here = std::make_shared<RingMemory>(memory);
  std::shared_ptr<const RingMemory> there = std::make_shared<RingMemory>(memory);
  SlabWriter writer{here->control(0).blocks, here->blocks(0)};
  SlabReader reader{there, there->control(0).blocks, there->blocks(0)};

  std::optional<uint64_t> place(size_t bytes, char value = 1) {
    return writer.place(filled(bytes, value), [] {});
  }
  Segment send(size_t bytes, char value = 1) { return reader.take(place(bytes, value).value(), bytes); }
};

/// Runs `body` in a child that is forked, which has passed if that gives true.
bool inFork(const std::function<bool()>& body) {
  const auto child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

TEST_CASE("large data are copied once: the tensor stands in the memory that is shared") {
  Shared shared;
  const auto source = filled(200'000, 7);
  int announced = 0;
  const auto place = shared.writer.place(source, [&] {
    ++announced;
    CHECK(shared.reader.isComing());
  });
  REQUIRE(place);
  CHECK(announced == 1);
  CHECK_FALSE(shared.reader.isComing());
  const auto segment = shared.reader.take(*place, source.bytes);
  std::memset(source.mutableData(), 0, source.bytes);
  CHECK(isFilled(segment, 200'000, 7));
  CHECK(segment.data() == shared.there->blocks(0).data() + *place);
  CHECK(segment.storage.resizable());
}

TEST_CASE("a block is used again when the last tensor in it has gone, and not before") {
  Shared shared;
  auto first = shared.send(3 * kUnit, 1);
  auto view = first.storage;
  const auto second = shared.place(kUnit);
  CHECK(second == 3 * kUnit);
  first = {};
  CHECK(shared.place(kUnit) == 4 * kUnit);
  CHECK(isFilled({view, 0, 3 * kUnit}, 3 * kUnit, 1));
  view = {};
  CHECK(shared.place(2 * kUnit) == 0);
  CHECK(shared.place(2 * kUnit) == 5 * kUnit);
  CHECK(shared.place(kUnit) == 2 * kUnit);
}

TEST_CASE("what is small, or finds no room, is not placed") {
  Shared shared;
  CHECK_FALSE(shared.place(kUnit - 1));
  CHECK_FALSE(shared.place(SlabControl::kBytes + 1));
  std::vector<Segment> held;
  for (size_t i = 0; i < 4; ++i) held.push_back(shared.send(SlabControl::kBytes / 4, static_cast<char>(i)));
  CHECK_FALSE(shared.place(kUnit));
  for (size_t i = 0; i < 4; ++i) CHECK(isFilled(held[i], SlabControl::kBytes / 4, static_cast<char>(i)));
  held.erase(held.begin() + 1);
  CHECK(shared.place(kUnit) == SlabControl::kBytes / 4);
}

TEST_CASE("the memory of all that a process writes to is bounded, and is free again with a connection") {
  auto first = std::make_unique<Shared>();
  Shared second;
  CHECK(first->place(96 * kMiB));
  CHECK_FALSE(second.place(64 * kMiB));
  CHECK(second.place(32 * kMiB));
  first.reset();
  CHECK(second.place(64 * kMiB));
}

TEST_CASE("places that no writer gives are refused") {
  Shared shared;
  const std::pair<uint64_t, size_t> places[] = {
      {1, 10},
      {0, 0},
      {SlabControl::kBytes, 1},
      {SlabControl::kBytes - kUnit, kUnit + 1},
      {~uint64_t{0} - kUnit + 1, kUnit},
      {0, ~size_t{0}}};
  for (const auto& [place, bytes] : places) {
    try {
      shared.reader.take(place, bytes);
      FAIL("taken: " << place << ", " << bytes);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kProtocol);
    }
  }
}

TEST_CASE("whatever a reader says it has given back, the writer stays within its memory") {
  Shared shared;
  std::mt19937 random(3);
  auto& control = shared.there->control(0).blocks;
  for (int i = 0; i < 300; ++i) {
    for (auto& returned : control.returned) returned = static_cast<uint8_t>(random());
    control.returns = random();
    const size_t bytes = kUnit + random() % (4 * kUnit);
    const auto place = shared.place(bytes);
    if (place) CHECK(*place + bytes <= SlabControl::kBytes);
  }
}

TEST_CASE("a tensor outlives the connection that it came over") {
  auto shared = std::make_unique<Shared>();
  const auto segment = shared->send(kMiB, 5);
  shared.reset();
  CHECK(isFilled(segment, kMiB, 5));
}

TEST_CASE("after a fork each process has its own tensor, as it was then") {
  Shared shared;
  auto segment = shared.send(kMiB, 5);
  int done[2];
  REQUIRE(::pipe(done) == 0);
  const auto child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    char byte = 0;
    const bool told = ::read(done[0], &byte, 1) == 1;  // what the parent does comes first
    const bool as_it_was = isFilled(segment, kMiB, 5);
    std::memset(segment.mutableData(), 7, kMiB);
    segment = {};
    ::_exit(told && as_it_was ? 0 : 1);
  }
  std::memset(segment.mutableData(), 6, kMiB);
  REQUIRE(::write(done[1], "", 1) == 1);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(isFilled(segment, kMiB, 6));
  CHECK(shared.place(kMiB) == kMiB);  // the child has given nothing back
  segment = {};
  CHECK(shared.place(kMiB) == 0);
  ::close(done[0]);
  ::close(done[1]);
}

TEST_CASE("a child has blocks of its own, and leaves alone those that its parent's tensors had") {
  Shared shared;
  auto segment = shared.send(kMiB, 5);
  CHECK(inFork([&] {
    Shared own;
    auto mine = own.send(kMiB, 8);
    const bool filled = isFilled(mine, kMiB, 8);
    segment = {};
    mine = {};
    return filled && own.place(kMiB) == 0;
  }));
  CHECK(isFilled(segment, kMiB, 5));
}

TEST_CASE("frames have their large segments placed, and all others in the stream, in order") {
  int sockets[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets) == 0);
  const auto memory = RingMemory::make();
  const bool places = GENERATE(true, false);
  const auto writer = makeRingStream(Descriptor(sockets[0]), memory, true, places);
  const auto reader = makeRingStream(Descriptor(sockets[1]), memory, false, true);
  const Frame sent{"head", {filled(0, 0), filled(kMiB, 1), filled(10'000, 2), filled(kUnit, 3), filled(5, 4)}};
  FrameQueue queue;
  queue.push({sent, nullptr, writer.get()});
  queue.push({headOnly("next"), nullptr, writer.get()});
  std::array<iovec, 64> parts;
  const auto bytes = writer->write({parts.data(), queue.gather(parts)});
  CHECK((bytes < 20'000) == places);

  const Limits limits;
  FrameReader frames(limits);
  std::vector<char> scratch(kUnit);
  std::vector<Frame> received;
  for (int turns = 0; received.size() < 2 && turns < 100; ++turns) {
    const auto read = reader->read({parts.data(), frames.room(scratch, parts)});
    REQUIRE(read >= 0);
    const auto refused = frames.take(static_cast<size_t>(read), scratch, *reader, [&](Frame frame) {
      received.push_back(std::move(frame));
      return true;
    });
    REQUIRE_FALSE(refused);
  }
  REQUIRE(received.size() == 2);
  CHECK(received[0].head == "head");
  CHECK(received[1].head == "next");
  REQUIRE(received[0].segments.size() == sent.segments.size());
  for (size_t i = 0; i < sent.segments.size(); ++i) {
    CHECK(isFilled(received[0].segments[i], sent.segments[i].bytes, static_cast<char>(i)));
  }
}
