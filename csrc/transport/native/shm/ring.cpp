#include "transport/native/shm/ring.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <new>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

namespace torchrpc::native {

namespace {

// Of each direction; PROTOCOL.md has the layout.
constexpr size_t kControlBytes = 4096;
constexpr size_t kRingBytes = 8 << 20;
constexpr size_t kAllBytes = 2 * (kControlBytes + kRingBytes + SlabControl::kBytes);
// What is moved before the other side is told: large enough for the cost of telling, small enough for both sides to
// copy at the same time.
constexpr size_t kStretch = 32 << 10;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

static_assert(sizeof(RingControl) <= kControlBytes);

}  // namespace

Descriptor RingMemory::make() {
  Descriptor memory(::memfd_create("torchrpc", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const bool ready =
      memory && ::ftruncate(memory.get(), kAllBytes) == 0 && ::fcntl(memory.get(), F_ADD_SEALS, kSeals) == 0;
  return ready ? std::move(memory) : Descriptor();
}

RingMemory::RingMemory(const Descriptor& memory) {
  struct stat status{};
  // Sealed: a peer that could shrink it could make us fault.
  const bool ours = ::fstat(memory.get(), &status) == 0 && (::fcntl(memory.get(), F_GET_SEALS) & kSeals) == kSeals;
  if (!ours || static_cast<size_t>(status.st_size) != kAllBytes) {
    throw Error(ErrorCode::kProtocol, "the shared memory that the peer gives is not as it must be");
  }
  void* base = ::mmap(nullptr, kAllBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (base == MAP_FAILED) {
    throw Error(ErrorCode::kWorkerLost, std::string("shared memory cannot be mapped: ") + std::strerror(errno));
  }
  base_ = static_cast<char*>(base);
}

RingMemory::~RingMemory() { ::munmap(base_, kAllBytes); }

RingControl& RingMemory::control(int direction) const {
  // Zeros are a valid state, and both sides may have begun.
  return *std::launder(reinterpret_cast<RingControl*>(base_ + direction * kControlBytes));
}

std::span<char> RingMemory::ring(int direction) const {
  return {base_ + 2 * kControlBytes + direction * kRingBytes, kRingBytes};
}

std::span<char> RingMemory::blocks(int direction) const {
  return {base_ + 2 * (kControlBytes + kRingBytes) + direction * SlabControl::kBytes, SlabControl::kBytes};
}

RingEnd::RingEnd(Side side, RingControl& control, std::span<char> bytes)
    : writes_(side == Side::kWriter),
      control_(control),
      own_(writes_ ? control.written : control.read),
      other_(writes_ ? control.read : control.written),
      bytes_(bytes) {}

ssize_t RingEnd::available() const {
  // What lies between the reader's position and the writer's. Only our own copy of our position is to be trusted.
  const auto other = other_.load();
  const auto own = position_.load(std::memory_order_relaxed);
  const uint64_t filled = writes_ ? own - other : other - own;
  if (filled > bytes_.size()) return -EPROTO;
  return static_cast<ssize_t>(writes_ ? bytes_.size() - filled : filled);
}

ssize_t RingEnd::move(std::span<const iovec> parts, size_t skip) {
  const auto there = available();
  if (there <= 0) return there;
  const size_t most = std::min(static_cast<size_t>(there), kStretch);
  const auto begin = position_.load(std::memory_order_relaxed);
  // What goes into an empty ring stands at its begin: small messages keep to the memory that is in the caches.
  if (writes_ && static_cast<size_t>(there) == bytes_.size()) control_.begin = begin;
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
      const size_t at = (begin + moved - origin) % bytes_.size();
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
