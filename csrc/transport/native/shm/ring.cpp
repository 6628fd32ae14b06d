#include "transport/native/shm/ring.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "base/os/memory.h"

namespace torchrpc::native {

namespace {

// Sizes for each direction. PROTOCOL.md specifies the layout.
constexpr size_t kMinControlBytes = 4096;
constexpr size_t kRingBytes = 8 << 20;

// Both sides must have this layout, regardless of their compilers and processors.
static_assert(offsetof(RingControl, written) == 0 && offsetof(RingControl, begin) == 8);
static_assert(offsetof(RingControl, read) == 128 && offsetof(RingControl, reader_waiting) == 256);
static_assert(offsetof(RingControl, writer_waiting) == 384 && offsetof(RingControl, slabs) == 512);
static_assert(offsetof(SlabControl, writes_in_progress) == 0 && offsetof(SlabControl, return_count) == 128);
static_assert(offsetof(SlabControl, returned) == 136 && sizeof(RingControl) <= kMinControlBytes);

}  // namespace

size_t RingLayout::systemPageBytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

RingLayout::RingLayout(size_t page_bytes)
    : page_bytes_(page_bytes), control_bytes_(std::max(kMinControlBytes, page_bytes)) {}

bool RingLayout::isUsable() const { return SlabControl::kUnitBytes % page_bytes_ == 0; }

size_t RingLayout::ring(int direction) const {
  return 2 * control_bytes_ + static_cast<size_t>(direction) * kRingBytes;
}

size_t RingLayout::slabs(int direction) const {
  return 2 * (control_bytes_ + kRingBytes) + static_cast<size_t>(direction) * SlabControl::kBytes;
}

size_t RingLayout::totalBytes() const { return slabs(2); }

Descriptor RingMemory::make(const RingLayout& layout) {
  Descriptor memory(os::openSharedMemory());
  const bool ready = memory && os::setSizeAndSeal(memory.get(), layout.totalBytes());
  if (!ready) return {};
  try {
    RingMemory(memory, layout);  // maps it once for a test: a limit of the address space may forbid it
  } catch (const Error& error) {
    static LogOnce once;
    once.log(LogLevel::kWarning, "no memory is shared: " + error.text());
    return {};
  }
  return memory;
}

RingMemory::RingMemory(const Descriptor& memory, const RingLayout& layout) : layout_(layout) {
  if (!layout.isUsable()) {
    throw Error(
        ErrorCode::kWorkerLost,
        "the pages of this system are larger than " + std::to_string(SlabControl::kUnitBytes) +
            " bytes, the unit in which tensors are placed in shared memory");
  }
  struct stat status{};
  // Without the seals, a peer could shrink the memory, and our next access would raise SIGBUS.
  const bool sealed = ::fstat(memory.get(), &status) == 0 && os::isSealed(memory.get());
  if (!sealed || static_cast<size_t>(status.st_size) != layout.totalBytes()) {
    throw Error(ErrorCode::kProtocol, "the peer's shared memory has the wrong size or seals");
  }
  void* base = ::mmap(nullptr, layout.totalBytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (base == MAP_FAILED) {
    throw Error(ErrorCode::kWorkerLost, std::string("shared memory cannot be mapped: ") + std::strerror(errno));
  }
  base_ = static_cast<char*>(base);
}

RingMemory::~RingMemory() { ::munmap(base_, layout_.totalBytes()); }

RingControl& RingMemory::control(int direction) const {
  // No constructor runs: zeros are a valid state, and the peer may already have written to the control.
  return *std::launder(reinterpret_cast<RingControl*>(base_ + layout_.control(direction)));
}

std::span<char> RingMemory::ring(int direction) const { return {base_ + layout_.ring(direction), kRingBytes}; }

std::span<char> RingMemory::slabs(int direction) const {
  return {base_ + layout_.slabs(direction), SlabControl::kBytes};
}

RingEnd::RingEnd(Side side, RingControl& control, std::span<char> bytes)
    : writes_(side == Side::kWriter),
      control_(control),
      own_(writes_ ? control.written : control.read),
      other_(writes_ ? control.read : control.written),
      bytes_(bytes) {}

ssize_t RingEnd::available() const {
  // The peer can overwrite both positions in the shared control. So this side uses position_ as its own.
  const auto other = other_.load();
  const auto own = position_.load(std::memory_order_relaxed);
  const uint64_t filled = writes_ ? own - other : other - own;
  if (filled > bytes_.size()) return -EPROTO;
  return static_cast<ssize_t>(writes_ ? bytes_.size() - filled : filled);
}

ssize_t RingEnd::move(std::span<const iovec> parts, size_t skip) {
  const auto room = available();
  if (room <= 0) return room;
  const size_t most = std::min(static_cast<size_t>(room), kChunkBytes);
  const auto begin = position_.load(std::memory_order_relaxed);
  // Bytes written to an empty ring go to the beginning of its memory, so small messages reuse memory that is in the
  // caches.
  if (writes_ && static_cast<size_t>(room) == bytes_.size()) control_.begin = begin;
  const uint64_t origin = control_.begin;
  size_t moved = 0;
  for (const auto& part : parts) {
    if (skip >= part.iov_len) {
      skip -= part.iov_len;
      continue;
    }
    char* data = static_cast<char*>(part.iov_base) + skip;
    size_t rest = std::min(part.iov_len - skip, most - moved);
    skip = 0;
    while (rest > 0) {
      const uint64_t from_origin = begin + moved - origin;
      const size_t at = from_origin < bytes_.size() ? from_origin : from_origin % bytes_.size();
      const size_t run = std::min(rest, bytes_.size() - at);
      if (writes_) {
        std::memcpy(bytes_.data() + at, data, run);
      } else {
        std::memcpy(data, bytes_.data() + at, run);
      }
      data += run;
      moved += run;
      rest -= run;
    }
    if (moved == most) break;
  }
  position_.store(begin + moved, std::memory_order_relaxed);
  own_.store(begin + moved);
  return static_cast<ssize_t>(moved);
}

}  // namespace torchrpc::native
