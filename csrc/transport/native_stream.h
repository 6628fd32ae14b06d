#pragma once

// What a native connection reads from and writes to: a socket, or rings in shared memory beside one. Never blocks.
// Internal to native_*.cpp.

#include <functional>
#include <memory>
#include <span>
#include <sys/types.h>
#include <sys/uio.h>

#include "transport/native_socket.h"

namespace torchrpc {

class NativeStream {
 public:
  virtual ~NativeStream() = default;

  // By one thread at a time.
  /// Bytes moved; 0: no room; negative: -errno, the stream has ended (-ECONNRESET if the peer ended it).
  virtual ssize_t write(std::span<const iovec> parts) = 0;
  /// After write() had no room. kNow: there is some now. kWatched: the socket becomes writable. kRung: it becomes
  /// readable, or ready() true.
  enum class Room { kNow, kWatched, kRung };
  virtual Room awaitRoom() = 0;

  // On the loop.
  /// As write(); 0: nothing there.
  virtual ssize_t read(std::span<const iovec> parts) = 0;
  /// The socket has become readable.
  virtual void hear() {}
  /// Whether it is worth trying to read, or to write what there was no room for.
  virtual bool ready() = 0;
  /// Whether reading and writing exclude each other.
  virtual bool isLocked() const { return false; }
  /// As NativeLoop::Spinner.
  virtual bool arm() { return true; }
  virtual void disarm() {}

  /// How many bytes of lent memory the peer has taken; any thread.
  virtual uint64_t taken() const { return 0; }
  /// Ends both directions at once; whichever thread is in a call.
  virtual void shutDown() = 0;
};

std::unique_ptr<NativeStream> makeSocketStream(Descriptor socket);

/// Rings in `memory`, and the socket as the bell and the sign of life. The two sides say a different `opener`.
/// `borrows`: copies large parts out of the peer's memory where it can and the peer wants it; `prefers_lending`:
/// whether we want it now, asked by whoever writes. Throws as RingMemory does.
std::unique_ptr<NativeStream> makeRingStream(
    Descriptor socket, const Descriptor& memory, bool opener, bool borrows, std::function<bool()> prefers_lending);

}  // namespace torchrpc
