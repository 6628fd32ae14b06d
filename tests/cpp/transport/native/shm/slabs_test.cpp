// Slabs in shared memory: tensors on them, their reuse, and forks.

#include <ATen/ATen.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <random>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
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
constexpr size_t kKiB = 1 << 10;
constexpr size_t kMiB = 1 << 20;

/// Writer and reader of the same memory, mapped at different addresses.
struct Shared {
  RingLayout layout;
  Descriptor memory = RingMemory::make(layout);
  std::shared_ptr<const RingMemory> here = std::make_shared<RingMemory>(memory, layout);
  std::shared_ptr<const RingMemory> there = std::make_shared<RingMemory>(memory, layout);
  SlabWriter writer{here, here->control(0).slabs, here->slabs(0)};
  SlabReader reader{there, there->control(0).slabs, there->slabs(0)};

  std::optional<uint64_t> write(size_t bytes, char value = 1) {
    return writer.write(filled(bytes, value), [] {});
  }
  /// The physical memory of the unit with that byte.
  size_t residentBytesOfUnit(size_t byte) const {
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> pages(kUnit / page);
    REQUIRE(::mincore(here->slabs(0).data() + byte / kUnit * kUnit, kUnit, pages.data()) == 0);
    return page * static_cast<size_t>(std::ranges::count_if(pages, [](unsigned char flags) { return flags & 1; }));
  }
  Segment send(size_t bytes, char value = 1) { return reader.lease(write(bytes, value).value(), bytes); }
};

/// The physical memory of a memfd.
size_t residentBytes(int memory) {
  struct stat status{};
  REQUIRE(::fstat(memory, &status) == 0);
  return static_cast<size_t>(status.st_blocks) * 512;
}

/// Runs `body` in a forked child. Returns its result.
bool inFork(const std::function<bool()>& body) {
  const auto child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

TEST_CASE("large data are copied once: the tensor uses the shared memory") {
  Shared shared;
  const auto source = filled(200'000, 7);
  int announced = 0;
  const auto slab_offset = shared.writer.write(source, [&] {
    ++announced;
    CHECK(shared.reader.isWriteInProgress());
  });
  REQUIRE(slab_offset);
  CHECK(announced == 1);
  CHECK_FALSE(shared.reader.isWriteInProgress());
  const auto segment = shared.reader.lease(*slab_offset, source.bytes);
  std::memset(source.mutableData(), 0, source.bytes);
  CHECK(isFilled(segment, 200'000, 7));
  CHECK(segment.data() == shared.there->slabs(0).data() + *slab_offset);
  CHECK(segment.storage.resizable());
}

TEST_CASE("a slab is reused when the last tensor on it has been destroyed, and not before") {
  Shared shared;
  auto first = shared.send(3 * kUnit, 1);
  auto view = first.storage;
  const auto second = shared.write(kUnit);
  CHECK(second == 3 * kUnit);
  first = {};
  CHECK(shared.write(kUnit) == 4 * kUnit);
  CHECK(isFilled({view, 0, 3 * kUnit}, 3 * kUnit, 1));
  view = {};
  CHECK(shared.write(2 * kUnit) == 0);
  CHECK(shared.write(2 * kUnit) == 5 * kUnit);
  CHECK(shared.write(kUnit) == 2 * kUnit);
}

TEST_CASE("small data, and data for which there is no room, get no slab") {
  Shared shared;
  CHECK_FALSE(shared.write(kUnit - 1));
  CHECK_FALSE(shared.write(SlabControl::kBytes + 1));
  std::vector<Segment> held;
  for (size_t i = 0; i < 4; ++i) held.push_back(shared.send(SlabControl::kBytes / 4, static_cast<char>(i)));
  CHECK_FALSE(shared.write(kUnit));
  for (size_t i = 0; i < 4; ++i) CHECK(isFilled(held[i], SlabControl::kBytes / 4, static_cast<char>(i)));
  held.erase(held.begin() + 1);
  CHECK(shared.write(kUnit) == SlabControl::kBytes / 4);
}

TEST_CASE("the resident memory of all writers of a process is bounded, and a writer's end frees its part") {
  auto first = std::make_unique<Shared>();
  Shared second;
  CHECK(first->write(96 * kMiB));
  CHECK_FALSE(second.write(64 * kMiB));
  CHECK(second.write(32 * kMiB));
  first.reset();
  CHECK(second.write(64 * kMiB));
}

TEST_CASE("memory that a writer has not used for some messages of another is given to that one") {
  Shared first, second;
  {
    const auto used = first.send(128 * kMiB, 1);
  }
  int refused = 0;
  while (!second.write(96 * kMiB) && refused < 20) ++refused;
  CHECK(refused > 0);  // a writer in use keeps its memory
  CHECK(refused < 10);
  CHECK(first.residentBytesOfUnit(0) == 0);
  CHECK_FALSE(first.write(64 * kMiB));
  CHECK(isFilled(first.send(32 * kMiB, 3), 32 * kMiB, 3));
}

TEST_CASE("a writer in use keeps its memory, and one that needs less gives the rest") {
  Shared first, second;
  {
    const auto used = first.send(96 * kMiB, 1);
  }
  for (int i = 0; i < 20; ++i) {
    CHECK_FALSE(second.write(64 * kMiB));
    const auto used = first.send(96 * kMiB, 2);
  }
  int refused = 0;
  for (; !second.write(64 * kMiB) && refused < 20; ++refused) {
    const auto used = first.send(kMiB, 3);
  }
  CHECK(refused < 10);
  CHECK(first.residentBytesOfUnit(kMiB - 1) > 0);
}

TEST_CASE("slabs with tensors are kept, whatever other writers need") {
  Shared first, second;
  auto unused = first.send(32 * kMiB, 1);
  const auto held = first.send(64 * kMiB, 2);
  unused = {};
  int refused = 0;
  while (!second.write(64 * kMiB) && refused < 20) ++refused;
  CHECK(refused < 10);
  CHECK(isFilled(held, 64 * kMiB, 2));
  CHECK_FALSE(second.write(kMiB));
}

TEST_CASE("a tensor that outlives its connection keeps its own memory only, which counts until it ends") {
  Shared other;
  auto shared = std::make_unique<Shared>();
  {
    const auto used = shared->send(64 * kMiB, 1);
  }
  auto held = shared->send(32 * kMiB, 2);
  const Descriptor memory(::dup(shared->memory.get()));
  shared.reset();
  CHECK(isFilled(held, 32 * kMiB, 2));
  CHECK(residentBytes(memory.get()) <= 33 * kMiB);
  CHECK_FALSE(other.write(112 * kMiB));
  held = {};
  CHECK(residentBytes(memory.get()) <= kMiB);
  CHECK(other.write(112 * kMiB));
}

TEST_CASE("a slab that the peer still uses counts while the memory is mapped here") {
  Shared other, shared;
  auto writer = std::make_unique<SlabWriter>(shared.here, shared.here->control(1).slabs, shared.here->slabs(1));
  const auto data = filled(64 * kMiB, 4);
  const auto slab_offset = writer->write(data, [] {});
  REQUIRE(slab_offset);
  SlabReader peer(shared.there, shared.there->control(1).slabs, shared.there->slabs(1));
  auto held = peer.lease(*slab_offset, data.bytes);
  writer.reset();
  CHECK_FALSE(other.write(96 * kMiB));
  CHECK(isFilled(held, data.bytes, 4));
  held = {};
  CHECK(other.write(96 * kMiB));
}

TEST_CASE("slab offsets that no writer gives are refused") {
  Shared shared;
  const std::pair<uint64_t, size_t> invalid[] = {
      {1, 10},
      {0, 0},
      {SlabControl::kBytes, 1},
      {SlabControl::kBytes - kUnit, kUnit + 1},
      {~uint64_t{0} - kUnit + 1, kUnit},
      {0, ~size_t{0}}};
  for (const auto& [slab_offset, bytes] : invalid) {
    try {
      shared.reader.lease(slab_offset, bytes);
      FAIL("leased: " << slab_offset << ", " << bytes);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kProtocol);
    }
  }
}

TEST_CASE("a slab of which a part is leased already is refused") {
  Shared shared;
  auto first = shared.reader.lease(2 * kUnit, 2 * kUnit);
  const auto is_refused = [&](uint64_t slab_offset, size_t bytes) {
    try {
      shared.reader.lease(slab_offset, bytes);
      return false;
    } catch (const Error& error) {
      return error.code() == ErrorCode::kProtocol;
    }
  };
  CHECK(is_refused(2 * kUnit, 2 * kUnit));
  CHECK(is_refused(3 * kUnit, 1));
  CHECK(is_refused(0, 2 * kUnit + 1));
  CHECK_FALSE(is_refused(kUnit, kUnit));
  CHECK_FALSE(is_refused(4 * kUnit, kUnit));
  first = {};
  CHECK_FALSE(is_refused(2 * kUnit, 2 * kUnit));
}

namespace {

/// The message as it arrives over slabs, of which the writer keeps its own mapping.
Message arrivedOverSlabs(Shared& shared, const at::Tensor& tensor, bool copies_shared) {
  auto frame = encodeFrame({.kind = Kind::kReply, .tensors = {tensor}});
  for (auto& segment : frame.segments) {
    const auto slab_offset = shared.writer.write(segment, [] {});
    REQUIRE(slab_offset);
    segment = shared.reader.lease(*slab_offset, segment.bytes);
  }
  if (copies_shared) copySharedSegments(frame);
  return decodeFrame(std::move(frame));
}

/// What a hostile sender does after its message has been checked.
void overwriteSlabs(const Shared& shared) { std::memset(shared.here->slabs(0).data(), 0x7f, 8 * kMiB); }

}  // namespace

TEST_CASE("a sender cannot change the indices of a sparse tensor that have been checked") {
  constexpr int64_t kCount = 20'000;
  // One element in each row, and in each column.
  const auto index = at::arange(kCount, at::kLong), pointers = at::arange(kCount + 1, at::kLong);
  const auto values = at::ones({kCount});
  const at::Tensor sparse[] = {
      at::sparse_coo_tensor(at::stack({index, index}), values, {kCount, kCount}),
      at::sparse_csr_tensor(pointers, index, values, {kCount, kCount}, at::kSparseCsr),
      at::sparse_csc_tensor(pointers, index, values, {kCount, kCount}, at::kSparseCsc)};
  for (const auto& tensor : sparse) {
    CAPTURE(tensor.layout());
    Shared shared;
    const auto arrived = arrivedOverSlabs(shared, tensor, /*copies_shared=*/false).tensors.at(0);
    overwriteSlabs(shared);
    if (tensor.layout() == at::kSparse) {
      CHECK(arrived._indices().equal(tensor._indices()));
    } else if (tensor.layout() == at::kSparseCsr) {
      CHECK(arrived.crow_indices().equal(tensor.crow_indices()));
      CHECK(arrived.col_indices().equal(tensor.col_indices()));
    } else {
      CHECK(arrived.ccol_indices().equal(tensor.ccol_indices()));
      CHECK(arrived.row_indices().equal(tensor.row_indices()));
    }
    // A kernel that relies on the check: with the sender's indices it would read far outside of the vector.
    CHECK(at::mv(arrived, at::ones({kCount})).sizes() == at::IntArrayRef{kCount});
  }
}

TEST_CASE("a sender cannot change any tensor that has been copied out of shared memory") {
  Shared shared;
  const auto tensor = at::arange(100'000, at::kLong);
  const auto arrived = arrivedOverSlabs(shared, tensor, /*copies_shared=*/true).tensors.at(0);
  overwriteSlabs(shared);
  CHECK(arrived.equal(tensor));
}

TEST_CASE("whichever slabs a reader claims to have returned, the writer stays within its memory") {
  Shared shared;
  std::mt19937 random(3);
  auto& control = shared.there->control(0).slabs;
  for (int i = 0; i < 300; ++i) {
    for (auto& returned : control.returned) returned = static_cast<uint8_t>(random());
    control.return_count = random();
    const size_t bytes = kUnit + random() % (4 * kUnit);
    const auto slab_offset = shared.write(bytes);
    if (slab_offset) CHECK(*slab_offset + bytes <= SlabControl::kBytes);
  }
}

TEST_CASE("a tensor outlives the connection over which it arrived") {
  auto shared = std::make_unique<Shared>();
  const auto segment = shared->send(kMiB, 5);
  shared.reset();
  CHECK(isFilled(segment, kMiB, 5));
}

TEST_CASE("rings and slabs are whole pages, whatever the size of a page is") {
  const size_t page = GENERATE(4 * kKiB, 16 * kKiB, 64 * kKiB);
  CAPTURE(page);
  const RingLayout layout(page);
  CHECK(layout.isUsable());
  CHECK(kUnit % page == 0);
  for (const int direction : {0, 1}) {
    CHECK(layout.ring(direction) % page == 0);
    CHECK(layout.slabs(direction) % page == 0);
  }
  CHECK(layout.control(1) >= sizeof(RingControl));
  CHECK(layout.ring(0) >= layout.control(1) + sizeof(RingControl));
  CHECK(layout.slabs(0) == layout.ring(1) + (layout.ring(1) - layout.ring(0)));
  CHECK(layout.totalBytes() == layout.slabs(1) + SlabControl::kBytes);
  CHECK(layout.totalBytes() % page == 0);
}

TEST_CASE("no memory is shared where a page is larger than a unit of slabs") {
  const RingLayout layout(256 * kKiB);
  CHECK_FALSE(layout.isUsable());
  CHECK_FALSE(RingMemory::make(layout));
  Descriptor memory(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(memory.get(), static_cast<off_t>(layout.totalBytes())) == 0);
  REQUIRE(::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  CHECK_THROWS_AS(RingMemory(memory, layout), Error);
}

TEST_CASE("after a fork, each process has its own copy of a tensor") {
  // In memory that is laid out for such pages: on a system that has them, only whole ones can be replaced in the child.
  const size_t page = GENERATE(4 * kKiB, 16 * kKiB, 64 * kKiB);
  CAPTURE(page);
  if (page < RingLayout::systemPageBytes()) return;
  Shared shared{RingLayout(page)};
  auto segment = shared.send(kMiB, 5);
  int done[2];
  REQUIRE(::pipe(done) == 0);
  const auto child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    char byte = 0;
    const bool parent_is_done = ::read(done[0], &byte, 1) == 1;
    const bool as_it_was = isFilled(segment, kMiB, 5);
    std::memset(segment.mutableData(), 7, kMiB);
    segment = {};
    ::_exit(parent_is_done && as_it_was ? 0 : 1);
  }
  std::memset(segment.mutableData(), 6, kMiB);
  REQUIRE(::write(done[1], "", 1) == 1);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(isFilled(segment, kMiB, 6));
  CHECK(shared.write(kMiB) == kMiB);  // the child has returned nothing
  segment = {};
  CHECK(shared.write(kMiB) == 0);
  ::close(done[0]);
  ::close(done[1]);
}

TEST_CASE("a forked child for which there is no memory does not share its parent's") {
  Shared shared;
  const auto segment = shared.send(16 * kMiB, 5);
  rlimit unlimited{};
  REQUIRE(::getrlimit(RLIMIT_AS, &unlimited) == 0);
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlimit no_more{pages * static_cast<size_t>(::sysconf(_SC_PAGESIZE)) + 8 * kMiB, unlimited.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_AS, &no_more) == 0);
  const auto child = ::fork();
  if (child == 0) {
    ::signal(SIGSEGV, SIG_DFL);
    std::memset(segment.mutableData(), 7, segment.bytes);
    ::_exit(0);
  }
  REQUIRE(::setrlimit(RLIMIT_AS, &unlimited) == 0);
  REQUIRE(child > 0);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status != 0);  // SIGSEGV, or the end of a sanitizer's runtime, which has no memory either
  CHECK(isFilled(segment, 16 * kMiB, 5));
}

TEST_CASE("a forked child has slabs of its own, and returns none of its parent's") {
  Shared shared;
  auto segment = shared.send(kMiB, 5);
  CHECK(inFork([&] {
    Shared own;
    auto mine = own.send(kMiB, 8);
    const bool filled = isFilled(mine, kMiB, 8);
    segment = {};
    mine = {};
    return filled && own.write(kMiB) == 0;
  }));
  CHECK(isFilled(segment, kMiB, 5));
}

TEST_CASE("one read or write of a ring leaves others their turn, however much there is to move") {
  int sockets[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets) == 0);
  const auto memory = RingMemory::make();
  const auto writer = makeRingStream(Descriptor(sockets[0]), memory, true, false);
  const auto reader = makeRingStream(Descriptor(sockets[1]), memory, false, false);
  std::vector<char> bytes(6 * kMiB);
  const iovec all{bytes.data(), bytes.size()};
  for (size_t written = 0; written < bytes.size();) {
    const auto some = writer->write({&all, 1});
    REQUIRE(some > 0);
    CHECK(static_cast<size_t>(some) < 2 * kMiB);
    written += static_cast<size_t>(some);
  }
  const auto read = reader->read({&all, 1});
  CHECK(read > 0);
  CHECK(static_cast<size_t>(read) < 2 * kMiB);
}

TEST_CASE("large segments of frames are on slabs, all others in the stream, in order") {
  int sockets[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets) == 0);
  const auto memory = RingMemory::make();
  const bool use_slabs = GENERATE(true, false);
  const auto writer = makeRingStream(Descriptor(sockets[0]), memory, true, use_slabs);
  const auto reader = makeRingStream(Descriptor(sockets[1]), memory, false, true);
  const Frame sent{"head", {filled(0, 0), filled(kMiB, 1), filled(10'000, 2), filled(kUnit, 3), filled(5, 4)}};
  FrameQueue queue;
  queue.push({sent, nullptr, writer.get()});
  queue.push({headOnly("next"), nullptr, writer.get()});
  std::array<iovec, 64> parts;
  size_t bytes = 0;
  for (FrameQueue::Sent written_frames; !queue.empty();) {
    const auto written = writer->write({parts.data(), queue.gather(parts)});
    REQUIRE(written > 0);
    bytes += static_cast<size_t>(written);
    queue.advance(static_cast<size_t>(written), written_frames);
  }
  CHECK((bytes < 20'000) == use_slabs);

  const Limits limits;
  FrameReader frames(limits);
  std::vector<char> scratch(kUnit);
  std::vector<Frame> received;
  for (int reads = 0; received.size() < 2 && reads < 100; ++reads) {
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
