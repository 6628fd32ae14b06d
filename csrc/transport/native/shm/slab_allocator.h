#pragma once

// Which units of a slab memory its writer has leased, and which occupy physical memory. All writers of a process share
// a limit of physical memory. A writer that finds it reached asks the others to give back the units that they do not
// use: see Note [Resident memory].
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
  /// False, and nothing is added, if the limit does not allow it.
  static bool reserve(size_t bytes);
  /// Adds the bytes of memory that is in use already.
  static void add(size_t bytes);
  static void release(size_t bytes);
};

/// Gives the physical memory of whole pages back to the system; they read as zeros from now on. False if it cannot.
bool discardPages(std::span<char> memory);

class SlabAllocator {
 public:
  /// `owner` owns control and memory.
  static std::shared_ptr<SlabAllocator> make(
      const std::shared_ptr<const void>& owner, SlabControl& control, std::span<char> memory);

  /// The first unit of a free slab, which is leased from now on until the reader returns it.
  std::optional<size_t> allocate(size_t units);
  /// The writer has ended: gives back all free units. Leased ones count until the reader has returned them or the
  /// memory is unmapped here.
  void retire();

 private:
  class Registry;
  using Units = std::bitset<SlabControl::kUnits>;

  SlabAllocator(const std::shared_ptr<const void>& owner, SlabControl& control, std::span<char> memory)
      : control_(control), memory_(memory), owner_(owner), weak_owner_(owner) {}

  /// As allocate(), within the limit. `lacks_memory` is set if the limit is the reason for returning nothing.
  std::optional<size_t> tryAllocate(size_t units, bool& lacks_memory);
  /// Another writer needs memory: gives back units that are not in use. False if this allocator has none left and will
  /// have no more.
  bool giveBack();
  /// The same for one that has been retired; true for others.
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
  std::shared_ptr<const void> owner_ TORCHRPC_GUARDED_BY(mutex_);  ///< until retire()
  std::weak_ptr<const void> weak_owner_ TORCHRPC_GUARDED_BY(mutex_);
  std::map<size_t, size_t> leased_ TORCHRPC_GUARDED_BY(mutex_);  ///< slabs: first unit, number of units
  Units resident_ TORCHRPC_GUARDED_BY(mutex_);                   ///< written at least once since they were given back
  uint64_t seen_return_count_ TORCHRPC_GUARDED_BY(mutex_) = 0;   ///< SlabControl::return_count of the last collection
  size_t recent_end_ TORCHRPC_GUARDED_BY(mutex_) = 0;            ///< the end of the units that were leased recently
  int requests_ TORCHRPC_GUARDED_BY(mutex_) = 0;                 ///< giveBack() since recent_end_ was reset
};

}  // namespace torchrpc::native
