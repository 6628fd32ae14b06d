// Buffers are kept and reused, within the limit.

#include "transport/buffer_cache.h"

#include <catch2/catch.hpp>

#include <cstring>

namespace torchrpc {

namespace {
constexpr size_t kMebibyte = 1 << 20;
}

TEST_CASE("a released buffer is reused for the same size") {
  BufferCache cache(64 * kMebibyte);
  auto first = cache.allocate(4 * kMebibyte);
  const auto* memory = first.get();
  CHECK(cache.bytes() == 0);
  first.clear();
  CHECK(cache.bytes() == 4 * kMebibyte);
  CHECK(cache.allocate(4 * kMebibyte - 100).get() == memory);
}

TEST_CASE("a buffer is not reused for a much smaller size") {
  BufferCache cache(64 * kMebibyte);
  cache.allocate(16 * kMebibyte).clear();
  const auto small = cache.allocate(2 * kMebibyte);
  CHECK(cache.bytes() == 16 * kMebibyte);
}

TEST_CASE("the most recently used buffers are kept, up to the limit") {
  BufferCache cache(8 * kMebibyte);
  auto old = cache.allocate(4 * kMebibyte);
  auto recent = cache.allocate(6 * kMebibyte);
  old.clear();
  const auto* memory = recent.get();
  recent.clear();
  CHECK(cache.bytes() == 6 * kMebibyte);
  CHECK(cache.allocate(6 * kMebibyte).get() == memory);
  cache.allocate(9 * kMebibyte).clear();
  CHECK(cache.bytes() <= 8 * kMebibyte);
}

TEST_CASE("buffers have the requested size") {
  BufferCache cache(0);
  for (const size_t bytes : {size_t{1}, size_t{4097}, kMebibyte, 2 * kMebibyte + 1}) {
    const auto buffer = cache.allocate(bytes);
    std::memset(buffer.get(), 1, bytes);
    CHECK(static_cast<const char*>(buffer.get())[bytes - 1] == 1);
  }
}

}  // namespace torchrpc
