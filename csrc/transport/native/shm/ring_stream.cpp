// Note [Wake-ups]
// A side that is going to sleep sets its wait word, then polls once more, then sleeps. A side that moves bytes moves
// them first, and then reads the wait word of its peer. All four accesses are sequentially consistent, so at least one
// side sees the write of the other: either the first side finds the bytes, or the second side finds the wait word set
// and wakes the first. The wake-up is a byte on the Unix socket, which the event loop watches anyway to detect the end
// of the peer's process; or a futex wake, for a thread that sleeps on the wait word itself: Note [Leader/Followers] in
// loop/event_loop.cpp.

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "base/os/sockets.h"
#include "base/process.h"
#include "base/timer.h"
#include "transport/native/byte_stream.h"
#include "transport/native/shm/ring.h"
#include "transport/native/shm/slab_allocator.h"
#include "transport/native/shm/slabs.h"

namespace torchrpc::native {

namespace {

// The reply to a large tensor is assumed to be as large. So a thread that waits for the reply polls for the time of two
// copies, one in each direction, but not longer than kMaxReplyExpected.
constexpr int kRoundTripFactor = 2;
constexpr auto kMaxReplyExpected = std::chrono::milliseconds(1);

// The limit of one read or write. It is necessary because a ring may never become full or empty while the peer moves
// bytes, too.
constexpr size_t kMaxMoveBytes = 1 << 20;

auto now() { return std::chrono::steady_clock::now(); }

class RingStream : public ByteStream {
 public:
  RingStream(Descriptor socket, const Descriptor& memory, bool opener, bool use_slabs)
      : socket_(std::move(socket)),
        memory_(std::make_shared<RingMemory>(memory)),
        use_slabs_(use_slabs),
        out_control_(memory_->control(opener ? 0 : 1)),
        in_control_(memory_->control(opener ? 1 : 0)),
        slabs_out_(memory_, out_control_.slabs, memory_->slabs(opener ? 0 : 1)),
        slabs_in_(memory_, in_control_.slabs, memory_->slabs(opener ? 1 : 0)),
        out_(RingEnd::Side::kWriter, out_control_, memory_->ring(opener ? 0 : 1)),
        in_bytes_(memory_->ring(opener ? 1 : 0)),
        in_(RingEnd::Side::kReader, in_control_, in_bytes_) {
    in_control_.reader_waiting = WakeMethod::kSocket;
  }
  ~RingStream() override {
    // Tensors may keep the memory mapped for long, so this frees the pages of the incoming ring. It keeps those of the
    // outgoing ring, which the peer may still read.
    if (maker_.isThisOne()) discardPages(in_bytes_);
  }

  ssize_t write(std::span<const iovec> parts) override {
    waiting_for_room_ = false;
    return moveSome(out_, parts, out_control_.reader_waiting);
  }
  Room requestRoom() override {
    waiting_for_room_ = true;
    if (!polled_) out_control_.writer_waiting = WakeMethod::kSocket;
    return hasRoom() ? Room::kNow : Room::kOnWakeup;
  }

  std::optional<uint64_t> copyToSlab(const Segment& data) override {
    if (!use_slabs_) return std::nullopt;
    const auto begin = now();
    const auto slab_offset = slabs_out_.write(data, [this] { wakePeer(out_control_.reader_waiting); });
    if (!slab_offset) return std::nullopt;
    const auto end = now();
    reply_expected_until_ = end + std::min<Duration>(kRoundTripFactor * (end - begin), kMaxReplyExpected);
    return slab_offset;
  }

  ssize_t read(std::span<const iovec> parts) override {
    const auto moved = moveSome(in_, parts, in_control_.writer_waiting);
    // Bytes that the peer wrote before it ended are read first.
    return moved == 0 && ended_ ? -ECONNRESET : moved;
  }
  Segment leaseFromSlab(uint64_t slab_offset, size_t bytes) override { return slabs_in_.lease(slab_offset, bytes); }
  void drainWakeups() override {
    char wakeups[64];
    for (;;) {
      const auto received = ::recv(socket_.get(), wakeups, sizeof(wakeups), 0);
      if (received < 0 && errno == EINTR) continue;
      if (received == 0 || (received < 0 && errno != EAGAIN)) ended_ = true;
      if (received < static_cast<ssize_t>(sizeof(wakeups))) return;
    }
  }
  bool ready() override { return ended_ || in_.available() != 0 || (waiting_for_room_ && hasRoom()); }
  PollHint pollHint() const override {
    if (slabs_in_.isWriteInProgress()) return PollHint::kWriteInProgress;
    return now() < reply_expected_until_.load() ? PollHint::kReplyExpected : PollHint::kNone;
  }
  bool arm(WakeTarget target) override {
    polled_ = false;
    in_control_.reader_waiting = target == WakeTarget::kLeader ? WakeMethod::kFutex : WakeMethod::kSocket;
    if (waiting_for_room_) out_control_.writer_waiting = WakeMethod::kSocket;
    return !ready();
  }
  void disarm() override {
    polled_ = true;
    in_control_.reader_waiting = WakeMethod::kNone;
    out_control_.writer_waiting = WakeMethod::kNone;
  }
  std::optional<FutexWaiter::WaitWord> waitWord() override {
    return FutexWaiter::WaitWord{{memory_, &in_control_.reader_waiting}, WakeMethod::kFutex};
  }

  std::string_view protection() const override { return "shared memory"; }
  void shutDown() override { ::shutdown(socket_.get(), SHUT_RDWR); }

 private:
  using Word = FutexWaiter::Word;

  bool hasRoom() const { return out_.available() != 0; }

  /// Moves bytes of the parts until all are moved, the ring allows no more, or kMaxMoveBytes are moved, so that other
  /// connections are served, too. Wakes the peer after each chunk. Does not look again after less than a chunk: the
  /// peer's position is in memory that the peer writes, so each look takes long.
  ssize_t moveSome(RingEnd& end, std::span<const iovec> parts, Word& peer_waiting) {
    size_t moved = 0;
    while (moved < kMaxMoveBytes) {
      const auto more = end.move(parts, moved);
      if (more < 0) return more;
      if (more == 0) break;
      moved += static_cast<size_t>(more);
      wakePeer(peer_waiting);
      if (static_cast<size_t>(more) < RingEnd::kChunkBytes) break;
    }
    return static_cast<ssize_t>(moved);
  }

  /// Wakes the peer if its wait word is set.
  void wakePeer(Word& peer_waiting) {
    if (peer_waiting.load() == WakeMethod::kNone) return;
    switch (peer_waiting.exchange(WakeMethod::kNone)) {
      // Errors are ignored: a full socket already contains unread wake-ups, and the loop detects the end of the peer.
      case WakeMethod::kSocket: ::send(socket_.get(), "", 1, os::kSendFlags); break;
      case WakeMethod::kFutex: FutexWaiter::wake(peer_waiting); break;
      default: break;
    }
  }

  // Constant after construction, or with synchronization of their own.
  const Descriptor socket_;
  const std::shared_ptr<const RingMemory> memory_;
  const bool use_slabs_;
  RingControl& out_control_;
  RingControl& in_control_;
  SlabWriter slabs_out_;
  const SlabReader slabs_in_;
  std::atomic<TimePoint> reply_expected_until_{TimePoint()};
  std::atomic<bool> waiting_for_room_{false};
  std::atomic<bool> polled_{false};  ///< a thread polls this stream, so the peer need not send wake-ups

  // Used by the thread that writes. On the loop, only ready() uses it, and only while waiting_for_room_.
  RingEnd out_;

  // On the loop only.
  const MakerProcess maker_;
  const std::span<char> in_bytes_;
  RingEnd in_;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<ByteStream> makeRingStream(Descriptor socket, const Descriptor& memory, bool opener, bool use_slabs) {
  return std::make_unique<RingStream>(std::move(socket), memory, opener, use_slabs);
}

}  // namespace torchrpc::native
