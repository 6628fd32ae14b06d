#pragma once

// The byte stream under a native connection: a socket, or shared memory beside one. Never blocks.

#include <memory>
#include <optional>
#include <span>
#include <sys/types.h>
#include <sys/uio.h>

#include "base/error.h"
#include "transport/native/auth/record_cipher.h"
#include "transport/native/loop/event_loop.h"
#include "transport/native/socket/socket.h"
#include "wire/message.h"

namespace torchrpc::native {

class TlsSession;

class ByteStream {
 public:
  virtual ~ByteStream() = default;

  // By one thread at a time.
  /// Writes bytes of `parts`. Returns the number of bytes written; 0: no room; negative: -errno, the stream has ended.
  virtual ssize_t write(std::span<const iovec> parts) = 0;
  /// How the owner of the stream notices that there is room again.
  enum class Room {
    kNow,         ///< there is room already
    kOnWritable,  ///< the socket will become writable
    kOnWakeup,    ///< the socket will become readable, or ready() will be true
  };
  /// Requests a notification, after write() has found no room. Does not block.
  virtual Room requestRoom() = 0;

  // By any thread.
  /// Copies the data of a large segment into a slab, if there is room for it. Returns the slab's offset, which is sent
  /// to the peer instead of the data; nothing if the data have to go through the stream.
  virtual std::optional<uint64_t> copyToSlab(const Segment& data) {
    static_cast<void>(data);
    return std::nullopt;
  }

  // With the loop lock.
  /// Reads bytes into `parts`. Returns the number of bytes read; 0: nothing to read; negative: -errno, the stream has
  /// ended (-ECONNRESET if the peer ended it).
  virtual ssize_t read(std::span<const iovec> parts) = 0;
  /// Returns the reason why the connection ends, after read() has returned the negative `result`.
  virtual Error readError(ssize_t result) const;
  /// Returns the data that the peer has copied into the slab at that offset. Throws Error(kProtocol) if there can be no
  /// such slab.
  virtual Segment leaseFromSlab(uint64_t slab_offset, size_t bytes);
  /// Called when the socket has become readable: discards the wake-ups in it.
  virtual void drainWakeups() {}
  /// Whether a read, or a write that had no room before, may move bytes now.
  virtual bool ready() = 0;
  /// Whether reads and writes exclude each other, because one lock guards both directions.
  virtual bool readExcludesWrite() const { return false; }
  // The next four: as Pollable's.
  virtual PollHint pollHint() const { return PollHint::kNone; }
  virtual bool arm(WakeTarget /*target*/) { return true; }
  virtual void disarm() {}
  virtual std::optional<FutexWaiter::WaitWord> waitWord() { return std::nullopt; }

  // By any thread, also during another call.
  /// Names what protects the bytes in transit, for example the cipher, for humans to read.
  virtual std::string_view protection() const { return "not encrypted"; }
  /// Shuts down both directions immediately.
  virtual void shutDown() = 0;
};

std::unique_ptr<ByteStream> makeSocketStream(Descriptor socket);

/// A socket on which all bytes are sent in sealed records. The `send` key of each side is the `receive` key of the
/// other side.
std::unique_ptr<ByteStream> makeSealedStream(Descriptor socket, const RecordKeys& keys);

/// A socket on which all bytes are sent in records of `session`, an established TLS session on this socket.
std::unique_ptr<ByteStream> makeTlsStream(Descriptor socket, std::unique_ptr<TlsSession> session);

/// Rings and slabs in the shared `memory`. The socket carries wake-ups, and is closed when the peer ends. `opener`:
/// true on one side and false on the other. `use_slabs`: whether large segments bypass the ring. Throws as RingMemory
/// does.
std::unique_ptr<ByteStream> makeRingStream(Descriptor socket, const Descriptor& memory, bool opener, bool use_slabs);

}  // namespace torchrpc::native
