#include "transport/buffer_cache.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <sys/mman.h>

namespace torchrpc {

namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kPage = 4 << 10;

}  // namespace

BufferCache::Memory BufferCache::newMemory(size_t bytes, size_t alignment) {
  Memory memory(std::aligned_alloc(alignment, bytes));
  if (!memory) throw std::bad_alloc();
  if (alignment == kHugePage) madvise(memory.get(), bytes, MADV_HUGEPAGE);  // a wish: it may be turned off
  return memory;
}

BufferCache::~BufferCache() = default;

c10::DataPtr BufferCache::allocate(size_t bytes) {
  const size_t alignment = bytes >= kHugePage ? kHugePage : kPage;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  Blocks block;
  {
    MutexLock lock(mutex_);
    const auto it = std::ranges::find(kept_, rounded, &Block::bytes);
    if (it != kept_.end()) {
      block.splice(block.end(), kept_, it);
      kept_bytes_ -= rounded;
    }
  }
  if (block.empty()) block.push_back({*this, newMemory(rounded, alignment), rounded});
  auto* data = block.front().memory.get();
  auto lent = std::make_unique<Blocks>(std::move(block));
  return {data, lent.release(), &giveBack, c10::Device(c10::DeviceType::CPU)};
}

void BufferCache::giveBack(void* lent) {
  const std::unique_ptr<Blocks> block(static_cast<Blocks*>(lent));
  auto& cache = block->front().cache;
  cache.keep(std::move(*block));
}

void BufferCache::keep(Blocks block) {
  Blocks freed;  // after the lock
  MutexLock lock(mutex_);
  kept_bytes_ += block.front().bytes;
  kept_.splice(kept_.begin(), block);
  while (kept_bytes_ > limit_) {
    kept_bytes_ -= kept_.back().bytes;
    freed.splice(freed.begin(), kept_, std::prev(kept_.end()));
  }
}

size_t BufferCache::bytes() const {
  MutexLock lock(mutex_);
  return kept_bytes_;
}

}  // namespace torchrpc
