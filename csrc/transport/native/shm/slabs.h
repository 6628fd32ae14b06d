#pragma once

// Tensors that bypass the ring. The writer copies the data of a large tensor into a slab: a run of units of the memory
// that both processes share. The reader's tensor has that slab as its storage (a lease), so the data are not copied
// again. When the last tensor on the slab is destroyed, the slab is returned to the writer. If there is no room, the
// data go through the ring.
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

  /// The threads of the writer that have nearly finished a copy.
  alignas(kDestructiveInterferenceBytes) std::atomic<uint32_t> writes_in_progress;
  /// The slabs that the reader has returned since the start.
  alignas(kDestructiveInterferenceBytes) std::atomic<uint64_t> return_count;
  std::atomic<uint8_t> returned[kUnits];  ///< for a slab's first unit: set by the reader, cleared by the writer
};
static_assert(std::atomic<uint8_t>::is_always_lock_free);

class SlabAllocator;

class SlabWriter {
 public:
  /// `owner` owns control and memory; the writer holds it.
  SlabWriter(const std::shared_ptr<const void>& owner, SlabControl& control, std::span<char> memory);
  ~SlabWriter();
  SlabWriter(const SlabWriter&) = delete;
  SlabWriter& operator=(const SlabWriter&) = delete;

  /// Copies the data into a slab. Returns the slab offset, in bytes from the begin of the memory; or nothing if there
  /// is no room, or if the data are so small that the ring is as fast. `announce` is called shortly before the copy is
  /// complete, so that a reader that sleeps can be woken in time.
  std::optional<uint64_t> write(const Segment& data, const std::function<void()>& announce);

 private:
  SlabControl& control_;
  const std::span<char> memory_;
  const std::shared_ptr<SlabAllocator> allocator_;
};

class SlabReader {
 public:
  /// `owner` owns control and memory; the reader and every lease hold it.
  SlabReader(std::shared_ptr<const void> owner, SlabControl& control, std::span<char> memory);
  /// From now on no slab is written: gives back the memory that no tensor needs.
  ~SlabReader();
  SlabReader(const SlabReader&) = delete;
  SlabReader& operator=(const SlabReader&) = delete;

  /// The slab at that offset as a segment. Throws Error(kProtocol) if no writer can have given offset and size: the
  /// slab is not inside the memory, or a part of it is leased already.
  Segment lease(uint64_t slab_offset, size_t bytes) const;
  /// Of the memory of all leases.
  static c10::DeleterFnPtr deleter();
  /// Whether the writer will have finished a copy soon.
  bool isWriteInProgress() const { return control_.writes_in_progress != 0; }

 private:
  struct Owner;
  struct Lease;
  const std::shared_ptr<Owner> owner_;
  SlabControl& control_;
  const std::span<char> memory_;
};

}  // namespace torchrpc::native
