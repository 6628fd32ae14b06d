#pragma once

// Tensors that pass a ring by: the writer copies the data of each into a block of memory that both processes have, and
// there the reader's tensor stays. Nobody copies it again, and the block is the writer's once more when the last tensor
// in it has gone. Where there is no room, data go through the ring.
// Threads: any.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "base/sync/mutex.h"
#include "wire/message.h"

namespace torchrpc::native {

/// The shared part of one direction's blocks, beside their bytes. Zeros are a valid state.
struct SlabControl {
  static constexpr size_t kUnitBytes = 64 << 10;  ///< blocks are so many units
  static constexpr size_t kUnits = 2048;
  static constexpr size_t kBytes = kUnits * kUnitBytes;

  alignas(64) std::atomic<uint32_t> placing;  ///< how many threads of the writer are about to have copied something
  alignas(64) std::atomic<uint64_t> returns;  ///< how many blocks the reader has given back, ever
  std::atomic<uint8_t> returned[kUnits];      ///< set by the reader for a block's first unit, cleared by the writer
};
static_assert(std::atomic<uint8_t>::is_always_lock_free);

class SlabWriter {
 public:
  /// Control and memory are the caller's to keep.
  SlabWriter(SlabControl& control, std::span<char> memory) : control_(control), memory_(memory) {}
  ~SlabWriter();
  SlabWriter(const SlabWriter&) = delete;
  SlabWriter& operator=(const SlabWriter&) = delete;

  /// Where the copy stands, counted from the begin of the memory; nothing, if there is no room, or if the data are so
  /// few that the ring is as good. `announce` is called shortly before the end: the reader may need to be woken.
  std::optional<uint64_t> place(const Segment& data, const std::function<void()>& announce);

 private:
  /// The first unit of a block that is ours.
  std::optional<size_t> allocate(size_t units);
  void collect() TORCHRPC_REQUIRES(mutex_);
  /// Whether the first `units` can be used.
  bool touch(size_t units) TORCHRPC_REQUIRES(mutex_);

  SlabControl& control_;
  const std::span<char> memory_;
  Mutex mutex_;
  // guarded by mutex_:
  std::map<size_t, size_t> lent_;  ///< blocks at the reader's: first unit, number of units
  size_t touched_ = 0;             ///< units from the first on that have been used, ever: these take memory
  uint64_t returns_ = 0;           ///< of which we know
};

class SlabReader {
 public:
  /// `owner`: of control and memory; it lives until the last tensor has gone.
  SlabReader(std::shared_ptr<const void> owner, SlabControl& control, std::span<char> memory)
      : owner_(std::move(owner)), control_(control), memory_(memory) {}

  /// What the writer has placed there. Throws Error(kProtocol) if it cannot have.
  Segment take(uint64_t place, size_t bytes) const;
  /// Whether the writer is about to have placed something.
  bool isComing() const { return control_.placing != 0; }

 private:
  const std::shared_ptr<const void> owner_;
  SlabControl& control_;
  const std::span<char> memory_;
};

}  // namespace torchrpc::native
