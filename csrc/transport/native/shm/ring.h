#pragma once

// Memory that two processes share, and the ring buffers of bytes in it. Each ring has one writer and one reader, and
// neither ever blocks. Even if the other process corrupts the shared control, this process accesses no byte outside of
// the ring. Threads: one thread at a time writes a ring, and one reads it.

#include <atomic>
#include <cstdint>
#include <span>
#include <sys/types.h>
#include <sys/uio.h>

#include "base/interference.h"
#include "transport/native/shm/slabs.h"
#include "transport/native/socket/socket.h"

namespace torchrpc::native {

/// How the peer has to wake a waiting side: the value of that side's wait word.
enum WakeMethod : uint32_t {
  kNone = 0,    ///< the side does not sleep
  kSocket = 1,  ///< by a byte on the Unix socket
  kFutex = 2,   ///< by FutexWaiter::wake() on the wait word, on which a thread sleeps
};

/// The shared control of one direction. Positions count bytes since the start and only grow; only one side writes each
/// position. PROTOCOL.md specifies the layout.
struct RingControl {
  alignas(kDestructiveInterferenceBytes) std::atomic<uint64_t> written;
  /// The position of the byte that is stored at the beginning of the ring's memory. The writer changes it only while
  /// the ring is empty, so a reader that finds bytes to read also finds the right value here.
  std::atomic<uint64_t> begin;
  alignas(kDestructiveInterferenceBytes) std::atomic<uint64_t> read;
  /// The wait words of the two sides. Each holds a WakeMethod: a side sets its wait word before it waits, and the peer
  /// clears the word and wakes that side. See Note [Wake-ups] in ring_stream.cpp.
  alignas(kDestructiveInterferenceBytes) std::atomic<uint32_t> reader_waiting;
  alignas(kDestructiveInterferenceBytes) std::atomic<uint32_t> writer_waiting;
  SlabControl slabs;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

/// The offsets of the parts of the shared memory, for both directions. Each ring and each slab consists of whole pages,
/// because the system can only discard and move whole pages (MADV_REMOVE, mremap).
class RingLayout {
 public:
  /// `page_bytes`: the page size of the system, and so of all processes that share the memory. Tests pass other sizes.
  explicit RingLayout(size_t page_bytes = systemPageBytes());
  static size_t systemPageBytes();

  /// Returns false if the pages are larger than the units of slabs. Workers share no memory then.
  bool isUsable() const;
  size_t control(int direction) const { return static_cast<size_t>(direction) * control_bytes_; }
  size_t ring(int direction) const;
  size_t slabs(int direction) const;
  size_t totalBytes() const;

 private:
  size_t page_bytes_;
  size_t control_bytes_;  ///< of one direction
};

/// Maps the shared memory: a ring and slabs for each of the two directions. A page occupies physical memory from its
/// first use on.
class RingMemory {
 public:
  /// Makes a memfd with empty rings, sealed so that it can neither shrink nor grow. Returns an invalid descriptor if
  /// the system cannot make or map it.
  static Descriptor make(const RingLayout& layout = RingLayout());
  /// Maps a memfd. Throws Error(kWorkerLost) if it cannot be mapped, Error(kProtocol) if its size or its seals are not
  /// those of make().
  explicit RingMemory(const Descriptor& memory, const RingLayout& layout = RingLayout());
  ~RingMemory();
  RingMemory(const RingMemory&) = delete;
  RingMemory& operator=(const RingMemory&) = delete;

  RingControl& control(int direction) const;
  std::span<char> ring(int direction) const;
  std::span<char> slabs(int direction) const;

 private:
  const RingLayout layout_;
  char* base_ = nullptr;
};

/// One side of a ring. Its accesses to the shared positions are sequentially consistent: see Note [Wake-ups].
class RingEnd {
 public:
  enum class Side { kWriter, kReader };
  /// The bytes that a side moves before it wakes the peer: enough to outweigh the cost of a wake-up, and few enough
  /// that both sides copy at the same time.
  static constexpr size_t kChunkBytes = 32 << 10;

  RingEnd(Side side, RingControl& control, std::span<char> bytes);

  /// Returns the number of bytes that can be moved now, or -errno if the peer's position is invalid.
  ssize_t available() const;
  /// Moves bytes between the ring and `parts`, without the first `skip` bytes of `parts`. Moves at most one chunk, so
  /// that the peer can copy at the same time. Returns the number of bytes, or -errno as available() does.
  ssize_t move(std::span<const iovec> parts, size_t skip);

 private:
  const bool writes_;
  RingControl& control_;
  std::atomic<uint64_t>& own_;
  const std::atomic<uint64_t>& other_;
  const std::span<char> bytes_;
  std::atomic<uint64_t> position_{0};  ///< of this side; the peer can overwrite the copy in the control
};

}  // namespace torchrpc::native
