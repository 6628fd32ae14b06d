// Note [Bells]
// Whoever is going to sleep says so in the ring's control, then looks once more, then sleeps; whoever moves bytes does
// that first and then looks whether the other sleeps. All of that in one order for both (sequentially consistent), so
// one of the two always sees the other. A bell is a byte on the Unix socket that the loop watches anyway, for the end
// of the peer, or the waking of a thread that sleeps on the very word: see Note [Sleeping in the loop's place].

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "base/timer.h"
#include "transport/native/byte_stream.h"
#include "transport/native/shm/ring.h"
#include "transport/native/shm/slabs.h"

namespace torchrpc::native {

namespace {

using Flag = std::atomic<uint32_t>;
using PollHint = EventLoop::PollHint;
using WakeTarget = EventLoop::WakeTarget;

// The answer to something large is taken to be so large, too: who waits for it looks until it could be here.
constexpr int kThereAndBack = 2;
constexpr auto kLongestAnswer = std::chrono::milliseconds(1);

auto now() { return std::chrono::steady_clock::now(); }

class RingStream : public ByteStream {
 public:
  RingStream(Descriptor socket, const Descriptor& memory, bool opener, bool places)
      : socket_(std::move(socket)),
        memory_(std::make_shared<RingMemory>(memory)),
        places_(places),
        out_control_(memory_->control(opener ? 0 : 1)),
        in_control_(memory_->control(opener ? 1 : 0)),
        blocks_out_(out_control_.blocks, memory_->blocks(opener ? 0 : 1)),
        blocks_in_(memory_, in_control_.blocks, memory_->blocks(opener ? 1 : 0)),
        out_(RingEnd::Side::kWriter, out_control_, memory_->ring(opener ? 0 : 1)),
        in_(RingEnd::Side::kReader, in_control_, memory_->ring(opener ? 1 : 0)) {
    in_control_.reader_sleeps = kOnSocket;
  }

  ssize_t write(std::span<const iovec> parts) override {
    waits_for_room_ = false;
    return moveAll(out_, parts, out_control_.reader_sleeps);
  }
  Room awaitRoom() override {
    waits_for_room_ = true;
    if (!loop_looks_) out_control_.writer_waits = kOnSocket;
    return hasRoom() ? Room::kNow : Room::kRung;
  }

  std::optional<uint64_t> place(const Segment& data) override {
    if (!places_) return std::nullopt;
    const auto begin = now();
    const auto place = blocks_out_.place(data, [this] { ring(out_control_.reader_sleeps); });
    if (!place) return std::nullopt;
    const auto end = now();
    answer_by_ = end + std::min<Duration>(kThereAndBack * (end - begin), kLongestAnswer);
    return place;
  }

  ssize_t read(std::span<const iovec> parts) override {
    const auto moved = moveAll(in_, parts, in_control_.writer_waits);
    // What the peer wrote before it went counts.
    return moved == 0 && ended_ ? -ECONNRESET : moved;
  }
  Segment take(uint64_t place, size_t bytes) override { return blocks_in_.take(place, bytes); }
  void drainWakeups() override {
    char wait_words[64];
    for (;;) {
      const auto heard = ::recv(socket_.get(), wait_words, sizeof(wait_words), 0);
      if (heard < 0 && errno == EINTR) continue;
      if (heard == 0 || (heard < 0 && errno != EAGAIN)) ended_ = true;
      if (heard < static_cast<ssize_t>(sizeof(wait_words))) return;
    }
  }
  bool ready() override { return ended_ || in_.available() != 0 || (waits_for_room_ && hasRoom()); }
  PollHint pollHint() const override {
    if (blocks_in_.isComing()) return PollHint::kWriteInProgress;
    return now() < answer_by_.load() ? PollHint::kReplyExpected : PollHint::kNone;
  }
  bool arm(WakeTarget sleeper) override {
    loop_looks_ = false;
    in_control_.reader_sleeps = sleeper == WakeTarget::kThread ? kOnWord : kOnSocket;
    if (waits_for_room_) out_control_.writer_waits = kOnSocket;
    return !ready();
  }
  void disarm() override {
    loop_looks_ = true;
    in_control_.reader_sleeps = kAwake;
    out_control_.writer_waits = kAwake;
  }
  std::optional<FutexWaiter::WaitWord> waitWord() override {
    return FutexWaiter::WaitWord{{memory_, &in_control_.reader_sleeps}, kOnWord};
  }

  void shutDown() override { ::shutdown(socket_.get(), SHUT_RDWR); }

 private:
  bool hasRoom() const { return out_.available() != 0; }

  /// All of the parts' bytes that there is room for.
  ssize_t moveAll(RingEnd& end, std::span<const iovec> parts, Flag& sleeper) {
    for (size_t moved = 0;;) {
      const auto more = end.move(parts, moved);
      if (more < 0) return more;
      if (more == 0) return static_cast<ssize_t>(moved);
      moved += static_cast<size_t>(more);
      ring(sleeper);
    }
  }

  void ring(Flag& sleeper) {
    // A bell that finds no room is not needed: there are others. One that finds nobody: the loop hears of it.
    if (sleeper.load() == kAwake) return;
    switch (sleeper.exchange(kAwake)) {
      case kOnSocket: ::send(socket_.get(), "", 1, MSG_NOSIGNAL); break;
      case kOnWord: FutexWaiter::wake(sleeper); break;
      default: break;
    }
  }

  // Constant after construction, or with synchronization of their own.
  const Descriptor socket_;
  const std::shared_ptr<const RingMemory> memory_;
  const bool places_;
  RingControl& out_control_;
  RingControl& in_control_;
  SlabWriter blocks_out_;
  const SlabReader blocks_in_;
  std::atomic<TimePoint> answer_by_{TimePoint()};
  std::atomic<bool> waits_for_room_{false};
  std::atomic<bool> loop_looks_{false};  ///< by itself, at ready()

  // Whoever writes. (waits_for_room_ makes it the loop's as far as ready() goes.)
  RingEnd out_;

  // On the loop only.
  RingEnd in_;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<ByteStream> makeRingStream(Descriptor socket, const Descriptor& memory, bool opener, bool places) {
  return std::make_unique<RingStream>(std::move(socket), memory, opener, places);
}

}  // namespace torchrpc::native
