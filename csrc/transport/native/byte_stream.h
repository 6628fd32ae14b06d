#pragma once

// What a native connection reads from and writes to: a socket, or shared memory beside one. Never blocks.

#include <memory>
#include <optional>
#include <span>
#include <sys/types.h>
#include <sys/uio.h>

#include "transport/native/loop/event_loop.h"
#include "transport/native/socket/socket.h"
#include "wire/message.h"

namespace torchrpc::native {

class ByteStream {
 public:
  virtual ~ByteStream() = default;

  // By one thread at a time.
  /// Bytes moved; 0: no room; negative: -errno, the stream has ended (-ECONNRESET if the peer ended it).
  virtual ssize_t write(std::span<const iovec> parts) = 0;
  /// After write() had no room. kNow: there is some now. kWatched: the socket becomes writable. kRung: it becomes
  /// readable, or ready() true.
  enum class Room { kNow, kWatched, kRung };
  virtual Room awaitRoom() = 0;

  // By any thread.
  /// Copies data to where the peer finds them, beside the stream, if it is large and there is room.
  virtual std::optional<uint64_t> place(const Segment& data) {
    static_cast<void>(data);
    return std::nullopt;
  }

  // On the loop.
  /// As write(); 0: nothing there.
  virtual ssize_t read(std::span<const iovec> parts) = 0;
  /// What the peer has placed there. Throws Error(kProtocol) if it cannot have.
  virtual Segment take(uint64_t place, size_t bytes);
  /// The socket has become readable.
  virtual void drainWakeups() {}
  /// Whether it is worth trying to read, or to write what there was no room for.
  virtual bool ready() = 0;
  /// Whether reading and writing exclude each other.
  virtual bool isLocked() const { return false; }
  /// As EventLoop::Pollable.
  virtual EventLoop::PollHint pollHint() const { return EventLoop::PollHint::kNone; }
  virtual bool arm(EventLoop::WakeTarget /*sleeper*/) { return true; }
  virtual void disarm() {}
  virtual std::optional<FutexWaiter::WaitWord> waitWord() { return std::nullopt; }

  /// Ends both directions at once; whichever thread is in a call.
  virtual void shutDown() = 0;
};

std::unique_ptr<ByteStream> makeSocketStream(Descriptor socket);

/// The shared `memory`, and the socket as the bell and the sign of life. The two sides say a different `opener`.
/// `places`: whether large data pass the ring by. Throws as RingMemory does.
std::unique_ptr<ByteStream> makeRingStream(Descriptor socket, const Descriptor& memory, bool opener, bool places);

}  // namespace torchrpc::native
