// Frames on a stream that arrive in pieces of any size.

#include <cstring>
#include <random>

#include "input.h"
#include "transport/frame_memory.h"
#include "transport/native/byte_stream.h"
#include "transport/native/frame_stream.h"

using namespace torchrpc;
using namespace torchrpc::native;

namespace {

/// Has a slab at every even offset.
class Slabs final : public ByteStream {
 public:
  ssize_t write(std::span<const iovec> /*parts*/) override { return 0; }
  Room requestRoom() override { return Room::kNow; }
  ssize_t read(std::span<const iovec> /*parts*/) override { return 0; }
  Segment leaseFromSlab(uint64_t slab_offset, size_t bytes) override {
    return slab_offset % 2 == 0 ? newSegment(bytes) : ByteStream::leaseFromSlab(slab_offset, bytes);
  }
  bool ready() override { return false; }
  void shutDown() override {}
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  std::minstd_rand random(input.byte() + 1);
  auto bytes = input.rest();
  const auto limits = fuzz::limits();
  FrameReader reader(limits);
  Slabs slabs;
  std::array<char, 64> scratch;
  std::array<iovec, 6> parts;
  while (!bytes.empty()) {
    const auto count = reader.room(scratch, parts);
    size_t room = 0;
    for (size_t i = 0; i < count; ++i) room += parts[i].iov_len;
    fuzz::expect(room > 0);
    const size_t read = std::min<size_t>(bytes.size(), 1 + random() % room);
    for (size_t i = 0, left = read; left > 0; ++i) {
      const auto some = std::min(left, parts[i].iov_len);
      std::memcpy(parts[i].iov_base, bytes.data(), some);
      bytes.remove_prefix(some);
      left -= some;
    }
    const auto refused = reader.take(read, scratch, slabs, [&](Frame frame) {
      fuzz::expect(frame.head.size() <= limits.head_bytes && frame.segments.size() <= limits.tensors);
      size_t bytes = frame.head.size();
      for (const auto& segment : frame.segments) bytes += segment.bytes;
      fuzz::expect(bytes <= limits.frame_bytes);
      return true;
    });
    if (!refused) continue;
    fuzz::expectRefusal(*refused);
    break;
  }
  return 0;
}
