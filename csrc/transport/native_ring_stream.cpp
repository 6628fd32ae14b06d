// Note [Bells]
// Whoever is going to sleep says so in the ring's control, then looks once more, then sleeps; whoever moves bytes does
// that first and then looks whether the other sleeps. All of that in one order for both (sequentially consistent), so
// one of the two always sees the other. A bell is a byte on the Unix socket that the loop watches anyway,
// for the end of the peer.

#include <algorithm>
#include <cerrno>

#include "transport/native_loan.h"
#include "transport/native_ring.h"
#include "transport/native_stream.h"

namespace torchrpc {

namespace {

using Flag = std::atomic<uint32_t>;

// Measured on two cores: through the ring both sides copy at the same time, and a large part takes half the time that
// it takes one of them to copy it out of the other's memory. Without a core each they take turns, a ring full a time
// slice: then lending is faster, for what is larger than a few rings.
constexpr size_t kLentFrom = 4 << 20;

class RingStream : public NativeStream {
 public:
  RingStream(
      Descriptor socket, const Descriptor& memory, bool opener, bool borrows, std::function<bool()> prefers_lending)
      : socket_(std::move(socket)),
        memory_(memory),
        prefers_lending_(std::move(prefers_lending)),
        out_control_(memory_.control(opener ? 0 : 1)),
        in_control_(memory_.control(opener ? 1 : 0)),
        out_(RingEnd::Side::kWriter, out_control_, memory_.bytes(opener ? 0 : 1)),
        lender_(out_control_.loan),
        in_(RingEnd::Side::kReader, in_control_, memory_.bytes(opener ? 1 : 0)),
        borrower_(in_control_.loan, borrows ? peerProcess(socket_.get()) : 0) {
    in_control_.reader_sleeps = 1;
  }

  ssize_t write(std::span<const iovec> parts) override {
    waits_for_room_ = false;
    size_t moved = 0;
    if (lender_.stands()) {
      const auto taken = lender_.collect();
      if (taken < 0 || lender_.stands()) return taken;
      moved = static_cast<size_t>(taken);
    }
    // What comes before the next part to be lent goes through the ring.
    size_t before = 0, count = 0;
    const auto lends = [&](size_t bytes) {
      return before + bytes >= std::max(before, moved) + kLentFrom && lender_.mayLend() && prefers_lending_();
    };
    while (count < parts.size() && !lends(parts[count].iov_len)) before += parts[count++].iov_len;
    const auto written = moveAll(out_, parts.first(count), moved, out_control_.reader_sleeps);
    if (written < 0 || count == parts.size() || static_cast<size_t>(written) < before) return written;
    const auto begun = static_cast<size_t>(written) - before;
    lender_.lend(static_cast<char*>(parts[count].iov_base) + begun, parts[count].iov_len - begun);
    ring(out_control_.reader_sleeps);
    return written;
  }
  Room awaitRoom() override {
    waits_for_room_ = true;
    if (!loop_looks_) out_control_.writer_waits = 1;
    return hasRoom() ? Room::kNow : Room::kRung;
  }

  ssize_t read(std::span<const iovec> parts) override {
    borrower_.probe();
    const bool lent = borrower_.isOffered();  // behind all that stands in the ring by now
    const auto moved = moveAll(in_, parts, 0, in_control_.writer_waits);
    if (moved != 0) return moved;
    if (lent) return borrow(parts);
    // What the peer wrote before it went counts.
    return ended_ ? -ECONNRESET : 0;
  }
  void hear() override {
    char bells[64];
    for (;;) {
      const auto heard = ::recv(socket_.get(), bells, sizeof(bells), 0);
      if (heard < 0 && errno == EINTR) continue;
      if (heard == 0 || (heard < 0 && errno != EAGAIN)) ended_ = true;
      if (heard < static_cast<ssize_t>(sizeof(bells))) return;
    }
  }
  bool ready() override {
    return ended_ || in_.available() != 0 || borrower_.isOffered() || (waits_for_room_ && hasRoom());
  }
  bool arm() override {
    loop_looks_ = false;
    in_control_.reader_sleeps = 1;
    if (waits_for_room_) out_control_.writer_waits = 1;
    return !ready();
  }
  void disarm() override {
    loop_looks_ = true;
    in_control_.reader_sleeps = 0;
    out_control_.writer_waits = 0;
  }

  uint64_t taken() const override { return lender_.taken(); }
  void shutDown() override {
    lender_.withdraw();
    ::shutdown(socket_.get(), SHUT_RDWR);
  }

 private:
  bool hasRoom() const { return lender_.stands() ? lender_.hasNews() : out_.available() != 0; }

  /// All that there is room for of the parts' bytes from `moved` on; the new `moved`.
  ssize_t moveAll(RingEnd& end, std::span<const iovec> parts, size_t moved, Flag& sleeper) {
    for (;;) {
      const auto more = end.move(parts, moved);
      if (more < 0) return more;
      if (more == 0) return static_cast<ssize_t>(moved);
      moved += static_cast<size_t>(more);
      ring(sleeper);
    }
  }

  ssize_t borrow(std::span<const iovec> parts) {
    const auto taken = borrower_.take(parts);
    if (!borrower_.isOffered()) ring(in_control_.writer_waits);
    return taken;
  }

  void ring(Flag& sleeper) {
    // A bell that finds no room is not needed: there are others. One that finds nobody: the loop hears of it.
    if (sleeper.load() && sleeper.exchange(0)) ::send(socket_.get(), "", 1, MSG_NOSIGNAL);
  }

  // Constant after construction, or with synchronization of their own.
  const Descriptor socket_;
  const RingMemory memory_;
  const std::function<bool()> prefers_lending_;
  RingControl& out_control_;
  RingControl& in_control_;
  std::atomic<bool> waits_for_room_{false};
  std::atomic<bool> loop_looks_{false};  ///< by itself, at ready()

  // Whoever writes.
  RingEnd out_;
  Lender lender_;

  // On the loop only. (waits_for_room_ makes out_ and lender_ the loop's as far as ready() goes.)
  RingEnd in_;
  Borrower borrower_;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<NativeStream> makeRingStream(
    Descriptor socket, const Descriptor& memory, bool opener, bool borrows, std::function<bool()> prefers_lending) {
  return std::make_unique<RingStream>(std::move(socket), memory, opener, borrows, std::move(prefers_lending));
}

}  // namespace torchrpc
