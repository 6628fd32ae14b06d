#pragma once

// Memory for large tensors that arrive. The kernel needs longer to provide fresh pages than it takes to copy a tensor
// into them. Therefore buffers whose tensors have been destroyed are kept for later tensors, up to a number of bytes,
// and buffers ask for huge pages. Thread-safe.

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdlib>
#include <list>
#include <memory>

#include "base/sync/mutex.h"

namespace torchrpc {

class BufferCache {
 public:
  /// Unused buffers of at most `limit_bytes` in all are kept.
  explicit BufferCache(size_t limit_bytes) : limit_bytes_(limit_bytes) {}
  /// Frees the unused buffers. Buffers in use must not outlive the cache.
  ~BufferCache();
  BufferCache(const BufferCache&) = delete;
  BufferCache& operator=(const BufferCache&) = delete;

  /// Memory that is not initialised. Throws std::bad_alloc.
  c10::DataPtr allocate(size_t bytes);

  /// That of the memory of every cache.
  static c10::DeleterFnPtr deleter() { return &deallocate; }

  /// The size of the unused buffers that are kept.
  size_t bytes() const;

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  using Memory = std::unique_ptr<void, Free>;
  struct Buffer {
    BufferCache& cache;
    Memory memory;
    size_t bytes;
  };
  using Buffers = std::list<Buffer>;

  static Memory newMemory(size_t bytes, size_t alignment);
  /// The deleter of a DataPtr: `context` is a list that holds the one buffer.
  static void deallocate(void* context);
  void keep(Buffers buffer);

  const size_t limit_bytes_;
  mutable Mutex mutex_;
  Buffers unused_ TORCHRPC_GUARDED_BY(mutex_);  ///< the most recently used first
  size_t unused_bytes_ TORCHRPC_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchrpc
