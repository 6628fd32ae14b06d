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
  /// The number of bytes written; 0: no room; negative: -errno, the stream has ended (-ECONNRESET if the peer ended
  /// it).
  virtual ssize_t write(std::span<const iovec> parts) = 0;
  /// How the stream shows that there is room again.
  enum class Room {
    kNow,         ///< there is room already
    kOnWritable,  ///< the socket becomes writable
    kOnWakeup,    ///< the socket becomes readable, or ready() true
  };
  /// After write() had no room: requests a notification. Does not block.
  virtual Room requestRoom() = 0;

  // By any thread.
  /// Copies the data of a large segment into a slab, if there is room for it. Returns the slab's offset, by which the
  /// peer finds the data; they do not go through the stream then.
  virtual std::optional<uint64_t> copyToSlab(const Segment& data) {
    static_cast<void>(data);
    return std::nullopt;
  }

  // With the loop lock.
  /// As write(); 0: nothing to read.
  virtual ssize_t read(std::span<const iovec> parts) = 0;
  /// Why the connection ends, after read() returned `result`, which is negative.
  virtual Error readError(ssize_t result) const;
  /// The data that the peer has copied into the slab at that offset. Throws Error(kProtocol) if there can be none.
  virtual Segment leaseFromSlab(uint64_t slab_offset, size_t bytes);
  /// The socket has become readable.
  virtual void drainWakeups() {}
  /// Whether a read, or a write that had no room before, may move bytes now.
  virtual bool ready() = 0;
  /// Whether a read and a write exclude each other, because the system has one lock for both.
  virtual bool readExcludesWrite() const { return false; }
  /// As Pollable's.
  virtual PollHint pollHint() const { return PollHint::kNone; }
  virtual bool arm(WakeTarget /*target*/) { return true; }
  virtual void disarm() {}
  virtual std::optional<FutexWaiter::WaitWord> waitWord() { return std::nullopt; }

  // By any thread, also during another call.
  /// How the bytes are protected on their way, for humans to read.
  virtual std::string_view protection() const { return "not encrypted"; }
  /// Ends both directions at once.
  virtual void shutDown() = 0;
};

std::unique_ptr<ByteStream> makeSocketStream(Descriptor socket);

/// A socket over which all bytes travel in sealed records. Each side's `send` key is the other's `receive` key.
std::unique_ptr<ByteStream> makeSealedStream(Descriptor socket, const RecordKeys& keys);

/// A socket over which all bytes travel in records of the established TLS session, whose socket it is.
std::unique_ptr<ByteStream> makeTlsStream(Descriptor socket, std::unique_ptr<TlsSession> session);

/// Rings and slabs in the shared `memory`. The socket carries wake-ups, and its end is the end of the peer. The two
/// sides pass a different `opener`. `use_slabs`: whether large segments bypass the ring. Throws as RingMemory does.
std::unique_ptr<ByteStream> makeRingStream(Descriptor socket, const Descriptor& memory, bool opener, bool use_slabs);

}  // namespace torchrpc::native
