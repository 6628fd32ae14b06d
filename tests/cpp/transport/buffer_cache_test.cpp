// Blocks: kept, given out again, within the limit.

#include "transport/buffer_cache.h"

#include <catch2/catch.hpp>

#include <cstring>

namespace torchrpc {

namespace {
constexpr size_t kMiB = 1 << 20;
}

TEST_CASE("a block that is let go of is given out again for as many bytes") {
  BufferCache cache(64 * kMiB);
  auto first = cache.allocate(4 * kMiB);
  const auto* memory = first.get();
  CHECK(cache.bytes() == 0);
  first.clear();
  CHECK(cache.bytes() == 4 * kMiB);
  CHECK(cache.allocate(4 * kMiB - 100).get() == memory);
}

TEST_CASE("a block is not given out for fewer bytes than it has, by far") {
  BufferCache cache(64 * kMiB);
  cache.allocate(16 * kMiB).clear();
  const auto small = cache.allocate(2 * kMiB);
  CHECK(cache.bytes() == 16 * kMiB);
}

TEST_CASE("blocks are kept up to the limit, the latest ones") {
  BufferCache cache(8 * kMiB);
  auto old = cache.allocate(4 * kMiB);
  auto recent = cache.allocate(6 * kMiB);
  old.clear();
  const auto* memory = recent.get();
  recent.clear();
  CHECK(cache.bytes() == 6 * kMiB);
  CHECK(cache.allocate(6 * kMiB).get() == memory);
  cache.allocate(9 * kMiB).clear();
  CHECK(cache.bytes() <= 8 * kMiB);
}

TEST_CASE("blocks have room for what was asked, to the last byte") {
  BufferCache cache(0);
  for (const size_t bytes : {size_t{1}, size_t{4097}, kMiB, 2 * kMiB + 1}) {
    const auto block = cache.allocate(bytes);
    std::memset(block.get(), 1, bytes);
    CHECK(static_cast<const char*>(block.get())[bytes - 1] == 1);
  }
}

}  // namespace torchrpc
