#pragma once

// Caches the memory of large received tensors. The kernel needs longer to provide fresh pages than it takes to copy a
// tensor into them. Therefore the cache keeps the buffers of destroyed tensors for later tensors, up to a number of
// bytes, and requests huge pages for its buffers. Thread-safe.

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdlib>
#include <list>
#include <memory>

#include "base/sync/fork_safe_mutex.h"

namespace torchrpc {

class BufferCache {
 public:
  /// Keeps unused buffers of at most `limit_bytes` in total.
  explicit BufferCache(size_t limit_bytes) : limit_bytes_(limit_bytes) {}
  /// Frees the unused buffers. Buffers in use must not outlive the cache.
  ~BufferCache();
  BufferCache(const BufferCache&) = delete;
  BufferCache& operator=(const BufferCache&) = delete;

  /// Returns uninitialised memory. Throws std::bad_alloc.
  c10::DataPtr allocate(size_t bytes);

  /// Returns the deleter of the memory of every cache.
  static c10::DeleterFnPtr deleter() { return &deallocate; }

  /// Returns the total size of the unused buffers.
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
  /// The deleter of a DataPtr. `context` is a Buffers list with this one buffer.
  static void deallocate(void* context);
  void keep(Buffers buffer);

  const size_t limit_bytes_;
  mutable ForkSafeMutex mutex_;
  Buffers unused_ TORCHRPC_GUARDED_BY(mutex_);  ///< most recently used first
  size_t unused_bytes_ TORCHRPC_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchrpc
