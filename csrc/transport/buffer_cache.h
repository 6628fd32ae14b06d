#pragma once

// Memory for large tensors that arrive. The kernel takes longer to hand out fresh pages than to copy a tensor into
// them, so blocks that tensors let go of are kept for the next ones, a bounded number of bytes; and they ask for huge
// pages. Thread-safe.

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdlib>
#include <list>
#include <memory>

#include "base/sync/mutex.h"

namespace torchrpc {

class BufferCache {
 public:
  /// The blocks kept while nobody uses them have at most `limit` bytes in all.
  explicit BufferCache(size_t limit) : limit_(limit) {}
  /// Frees what is kept; blocks still in use must not outlive it.
  ~BufferCache();
  BufferCache(const BufferCache&) = delete;
  BufferCache& operator=(const BufferCache&) = delete;

  /// Not initialised. Throws std::bad_alloc.
  c10::DataPtr allocate(size_t bytes);

  /// Kept at the moment.
  size_t bytes() const;

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  using Memory = std::unique_ptr<void, Free>;
  struct Block {
    BufferCache& cache;
    Memory memory;
    size_t bytes;
  };
  using Blocks = std::list<Block>;

  static Memory newMemory(size_t bytes, size_t alignment);
  static void giveBack(void* lent);
  void keep(Blocks block);

  const size_t limit_;
  mutable Mutex mutex_;
  // guarded by mutex_:
  Blocks kept_;  ///< the latest first
  size_t kept_bytes_ = 0;
};

}  // namespace torchrpc
