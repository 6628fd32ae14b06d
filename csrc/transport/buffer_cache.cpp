#include "transport/buffer_cache.h"

#include <algorithm>
#include <iterator>
#include <new>

#include "base/os/memory.h"

namespace torchrpc {

namespace {

// The size on most systems. Where a huge page is larger (32 MiB or 512 MiB with pages of 16 or 64 KiB), a buffer can
// only be a part of one, and works as well.
constexpr size_t kHugePageBytes = 2 << 20;
constexpr size_t kSmallAlignmentBytes = 4 << 10;  // of buffers smaller than a huge page, whatever the page size is

}  // namespace

BufferCache::Memory BufferCache::newMemory(size_t bytes, size_t alignment) {
  Memory memory(std::aligned_alloc(alignment, bytes));
  if (!memory) throw std::bad_alloc();
  if (alignment == kHugePageBytes) os::requestHugePages(memory.get(), bytes);
  return memory;
}

BufferCache::~BufferCache() = default;

c10::DataPtr BufferCache::allocate(size_t bytes) {
  const size_t alignment = bytes >= kHugePageBytes ? kHugePageBytes : kSmallAlignmentBytes;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  Buffers buffer;
  {
    MutexLock lock(mutex_);
    const auto it = std::ranges::find(unused_, rounded, &Buffer::bytes);
    if (it != unused_.end()) {
      buffer.splice(buffer.end(), unused_, it);
      unused_bytes_ -= rounded;
    }
  }
  if (buffer.empty()) buffer.push_back({*this, newMemory(rounded, alignment), rounded});
  auto* data = buffer.front().memory.get();
  auto context = std::make_unique<Buffers>(std::move(buffer));
  return {data, context.release(), &deallocate, c10::Device(c10::DeviceType::CPU)};
}

void BufferCache::deallocate(void* context) {
  const std::unique_ptr<Buffers> buffer(static_cast<Buffers*>(context));
  auto& cache = buffer->front().cache;
  cache.keep(std::move(*buffer));
}

void BufferCache::keep(Buffers buffer) {
  Buffers freed;  // destroyed after the lock
  MutexLock lock(mutex_);
  unused_bytes_ += buffer.front().bytes;
  unused_.splice(unused_.begin(), buffer);
  while (unused_bytes_ > limit_bytes_) {
    unused_bytes_ -= unused_.back().bytes;
    freed.splice(freed.begin(), unused_, std::prev(unused_.end()));
  }
}

size_t BufferCache::bytes() const {
  MutexLock lock(mutex_);
  return unused_bytes_;
}

}  // namespace torchrpc
