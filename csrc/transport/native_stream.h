#pragma once

// What a native connection reads from and writes to: a socket, or rings in shared memory beside one. Never blocks.
// Internal to native_*.cpp.

#include <memory>
#include <span>
#include <sys/types.h>
#include <sys/uio.h>

#include "transport/native_socket.h"

namespace torchrpc {

class NativeStream {
 public:
  virtual ~NativeStream() = default;

  /// Bytes moved; 0: would block; negative: -errno, the stream has ended (-ECONNRESET if the peer ended it).
  /// One thread at a time.
  virtual ssize_t write(std::span<const iovec> parts) = 0;
  /// On the loop.
  virtual ssize_t read(std::span<const iovec> parts) = 0;

  /// Ends both directions at once; reads and writes may be under way.
  virtual void shutDown() = 0;
};

std::unique_ptr<NativeStream> makeSocketStream(Descriptor socket);

}  // namespace torchrpc
