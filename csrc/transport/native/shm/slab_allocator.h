#pragma once

// Allocates slabs for a writer: it records which units are leased, and which occupy physical memory. All writers of a
// process share a limit of physical memory. A writer that reaches the limit asks the other writers to give back units
// that they do not use: see Note [Resident memory] in slab_allocator.cpp.
// Threads: any.

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "base/process.h"
#include "base/sync/mutex.h"
#include "transport/native/shm/slabs.h"

namespace torchrpc::native {

/// The bytes of slabs that occupy physical memory and count against the limit of this process.
class ResidentBytes {
 public:
  /// Adds the bytes, or returns false if that would exceed the limit.
  static bool reserve(size_t bytes);
  /// Adds the bytes regardless of the limit, for memory that is already in use.
  static void add(size_t bytes);
  static void release(size_t bytes);
};

/// Gives the physical memory of whole pages back to the system. The pages then read as zeros. Returns false if the
/// system refuses.
bool discardPages(std::span<char> memory);

class SlabAllocator {
 public:
  /// `owner` keeps `control` and `memory` alive.
  static std::shared_ptr<SlabAllocator> make(
      const std::shared_ptr<const void>& owner, SlabControl& control, std::span<char> memory);

  /// Leases a slab until the reader returns it. Returns its first unit, or nullopt if there is no room.
  std::optional<size_t> allocate(size_t units);
  /// Called when the writer is destroyed: gives back all free units. Leased units count until the reader has returned
  /// them or this process has unmapped the memory.
  void retire();

 private:
  class Registry;
  using Units = std::bitset<SlabControl::kUnits>;

  SlabAllocator(const std::shared_ptr<const void>& owner, SlabControl& control, std::span<char> memory)
      : control_(control), memory_(memory), owner_(owner), weak_owner_(owner) {}

  /// As allocate(), but asks no other writer for memory. Sets `lacks_memory` if it returns nullopt because of the
  /// limit.
  std::optional<size_t> tryAllocate(size_t units, bool& lacks_memory);
  /// Called when another writer needs memory: gives back units that are not in use. Returns false if this allocator has
  /// no resident units left and will have no more.
  bool giveBack();
  /// Calls giveBack() if this allocator is retired. Returns true otherwise.
  bool giveBackIfRetired();
  /// Gives back the free units from `begin` on.
  void discardFree(size_t begin) TORCHRPC_REQUIRES(mutex_);
  /// Frees the slabs that the reader has returned.
  void collectReturned() TORCHRPC_REQUIRES(mutex_);
  Units freeUnits() const TORCHRPC_REQUIRES(mutex_);

  // Constant after construction.
  SlabControl& control_;
  const std::span<char> memory_;
  const MakerProcess maker_;

  Mutex mutex_;
  std::shared_ptr<const void> owner_ TORCHRPC_GUARDED_BY(mutex_);  ///< null after retire()
  std::weak_ptr<const void> weak_owner_ TORCHRPC_GUARDED_BY(mutex_);
  std::map<size_t, size_t> leased_ TORCHRPC_GUARDED_BY(mutex_);  ///< number of units, by first unit
  Units resident_ TORCHRPC_GUARDED_BY(mutex_);                   ///< written since they were last given back
  uint64_t seen_return_count_ TORCHRPC_GUARDED_BY(mutex_) = 0;   ///< SlabControl::return_count of the last collection
  size_t recent_end_ TORCHRPC_GUARDED_BY(mutex_) = 0;  ///< the end of the units that were leased since its reset
  int requests_ TORCHRPC_GUARDED_BY(mutex_) = 0;       ///< calls of giveBack() since recent_end_ was reset
};

}  // namespace torchrpc::native
