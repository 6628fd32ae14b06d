#pragma once

// Transfers large tensors beside the ring. The writer copies the data of a large tensor into a slab: a run of units of
// the memory that both processes share. The reader's tensor uses that slab as its storage (a lease), so the reader does
// not copy the data again. When the last tensor on the slab is destroyed, the reader returns the slab to the writer. If
// there is no room, the data go through the ring.
// Threads: any.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "base/interference.h"
#include "wire/message.h"

namespace torchrpc::native {

/// The shared control of the slabs of one direction. Zeros are a valid state.
struct SlabControl {
  static constexpr size_t kUnitBytes = 64 << 10;  ///< the size of a slab is a multiple of this
  static constexpr size_t kUnits = 2048;
  static constexpr size_t kBytes = kUnits * kUnitBytes;

  /// The number of the writer's threads that have nearly finished a copy.
  alignas(kDestructiveInterferenceBytes) std::atomic<uint32_t> writes_in_progress;
  /// The number of slabs that the reader has returned since the start.
  alignas(kDestructiveInterferenceBytes) std::atomic<uint64_t> return_count;
  std::atomic<uint8_t> returned[kUnits];  ///< at a slab's first unit: set by the reader, cleared by the writer
};
static_assert(std::atomic<uint8_t>::is_always_lock_free);

class SlabAllocator;

class SlabWriter {
 public:
  /// `owner` keeps `control` and `memory` alive; the writer holds a reference to it.
  SlabWriter(const std::shared_ptr<const void>& owner, SlabControl& control, std::span<char> memory);
  ~SlabWriter();
  SlabWriter(const SlabWriter&) = delete;
  SlabWriter& operator=(const SlabWriter&) = delete;

  /// Copies the data into a slab. Returns the slab's offset in the memory, in bytes; nullopt if there is no room, or if
  /// the data are so small that the ring is as fast. Calls `announce` shortly before the copy is complete, so that a
  /// sleeping reader is awake in time.
  std::optional<uint64_t> write(const Segment& data, const std::function<void()>& announce);

 private:
  SlabControl& control_;
  const std::span<char> memory_;
  const std::shared_ptr<SlabAllocator> allocator_;
};

class SlabReader {
 public:
  /// `owner` keeps `control` and `memory` alive; the reader and every lease hold a reference to it.
  SlabReader(std::shared_ptr<const void> owner, SlabControl& control, std::span<char> memory);
  /// Gives back the memory that no tensor needs. No slab may be written afterwards.
  ~SlabReader();
  SlabReader(const SlabReader&) = delete;
  SlabReader& operator=(const SlabReader&) = delete;

  /// Returns the slab at that offset as a segment. Throws Error(kProtocol) if a correct writer cannot have sent the
  /// offset and size: the slab is not inside the memory, or a part of it is already leased.
  Segment lease(uint64_t slab_offset, size_t bytes) const;
  /// Returns the deleter of the memory of all leases.
  static c10::DeleterFnPtr deleter();
  /// Whether the writer is about to finish a copy.
  bool isWriteInProgress() const { return control_.writes_in_progress != 0; }

 private:
  struct Owner;
  struct Lease;
  const std::shared_ptr<Owner> owner_;
  SlabControl& control_;
  const std::span<char> memory_;
};

}  // namespace torchrpc::native
