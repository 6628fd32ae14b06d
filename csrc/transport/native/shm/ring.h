#pragma once

// Memory that two processes share, and the ring buffers of bytes in it. Each ring has one writer and one reader, and
// neither ever blocks. Whatever the other process does to the shared control, no byte outside of the ring is accessed.
// Threads: one that writes and one that reads each ring.

#include <atomic>
#include <cstdint>
#include <span>
#include <sys/types.h>
#include <sys/uio.h>

#include "base/interference.h"
#include "transport/native/shm/slabs.h"
#include "transport/native/socket/socket.h"

namespace torchrpc::native {

/// How a side that waits is to be woken: the value of its wait word.
enum WakeMethod : uint32_t {
  kNone = 0,    ///< it does not sleep
  kSocket = 1,  ///< by a byte on the Unix socket
  kFutex = 2,   ///< by FutexWaiter::wake() on the wait word, on which a thread sleeps
};

/// The shared control of one direction. Positions count bytes since the start and only grow; each is written by one
/// side. PROTOCOL.md specifies the layout.
struct RingControl {
  alignas(kDestructiveInterferenceBytes) std::atomic<uint64_t> written;
  /// The position of the byte at the begin of the ring's memory. It changes only while the ring is empty, so a reader
  /// that finds bytes to read also finds the right value here.
  std::atomic<uint64_t> begin;
  alignas(kDestructiveInterferenceBytes) std::atomic<uint64_t> read;
  /// The wait words of the two sides hold a WakeMethod: set by the side that is going to wait, cleared by its peer,
  /// which then wakes it. See Note [Wake-ups].
  alignas(kDestructiveInterferenceBytes) std::atomic<uint32_t> reader_waiting;
  alignas(kDestructiveInterferenceBytes) std::atomic<uint32_t> writer_waiting;
  SlabControl slabs;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

/// Where the parts of the shared memory begin, for both directions. Each ring and each slab consists of whole pages:
/// the system discards and moves only such (MADV_REMOVE, mremap).
class RingLayout {
 public:
  /// `page_bytes`: of the system, which all processes that share memory have in common; tests give others.
  explicit RingLayout(size_t page_bytes = systemPageBytes());
  static size_t systemPageBytes();

  /// False if the pages are larger than the units of slabs: then no memory is shared.
  bool isUsable() const;
  size_t control(int direction) const { return static_cast<size_t>(direction) * control_bytes_; }
  size_t ring(int direction) const;
  size_t slabs(int direction) const;
  size_t totalBytes() const;

 private:
  size_t page_bytes_;
  size_t control_bytes_;  ///< of one direction
};

/// The mapping of a ring and slabs for each of two directions. Pages occupy physical memory from their first use on.
class RingMemory {
 public:
  /// A new memfd with empty rings, sealed so that it can neither shrink nor grow; invalid if the system cannot make it.
  static Descriptor make(const RingLayout& layout = RingLayout());
  /// Throws Error(kWorkerLost) if it cannot be mapped, Error(kProtocol) if it has another size or other seals than
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

/// One side of a ring. Its accesses are sequentially consistent: see Note [Wake-ups].
class RingEnd {
 public:
  enum class Side { kWriter, kReader };
  RingEnd(Side side, RingControl& control, std::span<char> bytes);

  /// The number of bytes that can be moved now. Negative (-errno): the peer's position is invalid.
  ssize_t available() const;
  /// Moves bytes between the ring and `parts`, of which the first `skip` bytes are skipped. Moves at most one chunk, so
  /// that the other side can copy at the same time. Returns the number of bytes, or as available().
  ssize_t move(std::span<const iovec> parts, size_t skip);

 private:
  const bool writes_;
  RingControl& control_;
  std::atomic<uint64_t>& own_;
  const std::atomic<uint64_t>& other_;
  const std::span<char> bytes_;
  std::atomic<uint64_t> position_{0};  ///< our own; the peer can overwrite its copy in the shared control
};

}  // namespace torchrpc::native
