#pragma once

// Memory that two processes share, and the rings of bytes in it: one writes, one reads, neither waits. Whatever the
// other process does to the shared part, nothing outside the ring is read or written.
// Threads: one writer and one reader a ring.

#include <atomic>
#include <cstdint>
#include <span>
#include <sys/types.h>
#include <sys/uio.h>

#include "transport/native/shm/slabs.h"
#include "transport/native/socket/socket.h"

namespace torchrpc::native {

/// The shared part of one direction, beside the bytes of ring and blocks. Positions only grow; each is written by one
/// side.
struct RingControl {
  alignas(64) std::atomic<uint64_t> written;
  /// The position that stands at the ring's begin. Changes only while the ring is empty: a reader that has seen bytes
  /// beyond its own position sees the right one.
  std::atomic<uint64_t> begin;
  alignas(64) std::atomic<uint64_t> read;
  /// Set by the side that is going to wait, cleared by the other, which then rings: see RingSleep.
  alignas(64) std::atomic<uint32_t> reader_sleeps;
  alignas(64) std::atomic<uint32_t> writer_waits;
  SlabControl blocks;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

/// Where the side that waits is to be woken.
enum RingSleep : uint32_t {
  kAwake = 0,
  kOnSocket = 1,  ///< it hears a byte on the Unix socket
  kOnWord = 2,    ///< a thread sleeps on the word that says so (futex)
};

/// A ring and blocks for each of two directions. Takes memory where it has been used.
class RingMemory {
 public:
  /// An empty one, in a memfd that can neither shrink nor grow; invalid if there is none to be had.
  static Descriptor make();
  /// Throws Error(kWorkerLost) if it cannot be mapped, Error(kProtocol) if it is not what make() makes.
  explicit RingMemory(const Descriptor& memory);
  ~RingMemory();
  RingMemory(const RingMemory&) = delete;
  RingMemory& operator=(const RingMemory&) = delete;

  RingControl& control(int direction) const;
  std::span<char> ring(int direction) const;
  std::span<char> blocks(int direction) const;

 private:
  char* base_ = nullptr;
};

/// One side of a ring. Sequentially consistent: see Note [Bells].
class RingEnd {
 public:
  enum class Side { kWriter, kReader };
  RingEnd(Side side, RingControl& control, std::span<char> bytes);

  /// How many bytes can be moved now; negative: the peer has broken the ring.
  ssize_t available() const;
  /// Moves a stretch of bytes between the ring and the parts' bytes from `skip` on, as many as are available and as
  /// should be moved in one go, so that the other side can work at the same time. As available().
  ssize_t move(std::span<const iovec> parts, size_t skip);

 private:
  const bool writes_;
  RingControl& control_;
  std::atomic<uint64_t>& own_;
  const std::atomic<uint64_t>& other_;
  const std::span<char> bytes_;
  std::atomic<uint64_t> position_{0};  // ours: what stands in the shared memory is the peer's to change
};

}  // namespace torchrpc::native
