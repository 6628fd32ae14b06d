#pragma once

// Frames as bytes of a stream, both ways: nothing is copied but headers and what shares a read with them. PROTOCOL.md
// has the bytes.
// Threads: one at a time.

#include <array>
#include <deque>
#include <functional>
#include <span>
#include <sys/uio.h>
#include <vector>

#include "transport/native/byte_stream.h"
#include "transport/transport.h"

namespace torchrpc::native {

/// Stands before each frame, little-endian; then the size of each segment (u64) and, if one of them does not stand in
/// the stream, the place of each; then the head, and the segments that do.
struct FrameHeader {
  uint64_t head_bytes = 0;
  uint32_t segments = 0;
  uint32_t flags = 0;

  static constexpr uint32_t kPlaces = 1;               ///< flag: places follow the sizes
  static constexpr uint64_t kInStream = ~uint64_t{0};  ///< a place
};

/// Frames on their way out.
class FrameQueue {
 public:
  struct Outgoing {
    /// Has what is large placed beside the stream, if one is given. Any thread.
    Outgoing(Frame frame, std::function<void(Status)> done, ByteStream* stream = nullptr);

    Frame frame;  ///< of its segments those that go through the stream
    std::function<void(Status)> done;
    FrameHeader header;
    std::vector<uint64_t> layout{};  ///< sizes, and places

    /// Header, layout, head, then the segments.
    size_t parts() const { return 3 + frame.segments.size(); }
    iovec part(size_t index) const;
  };

  void push(Outgoing outgoing) { queue_.push_back(std::move(outgoing)); }
  bool empty() const { return queue_.empty(); }
  /// What comes next, as many parts as fit; they stay valid until advance() passes them.
  size_t gather(std::span<iovec> parts) const;
  /// That many bytes have been written: adds the frames that have gone whole to `gone`.
  void advance(size_t bytes, std::vector<Outgoing>& gone);
  std::vector<Outgoing> takeAll();

 private:
  std::deque<Outgoing> queue_;
  // How far the first has gone.
  size_t part_ = 0;
  size_t offset_ = 0;
};

/// Frames on their way in. Sizes are held to the limits before anything is allocated for them.
class FrameReader {
 public:
  explicit FrameReader(const Limits& limits) : limits_(limits) {}

  /// How many bytes of the frame in hand are known to come yet.
  size_t missing() const;
  /// Where the next bytes belong; what comes after them, and small frames, go to `scratch`.
  size_t room(std::span<char> scratch, std::span<iovec> parts) const;
  /// That many bytes have come there, from `stream`. Calls `deliver` for each frame that is whole, until it returns
  /// false. An error: the peer breaks the protocol or the limits.
  Status take(size_t bytes, std::span<char> scratch, ByteStream& stream, const std::function<bool(Frame)>& deliver);

 private:
  enum class Stage { kHeader, kLayout, kBody };
  struct Target {
    char* data;
    size_t bytes;
  };
  void begin(Stage stage);
  void addTarget(void* data, size_t bytes);
  /// Passes `bytes` of the targets.
  void fill(size_t bytes);
  bool filled() const { return next_ == targets_.size(); }
  /// The targets of this stage are full. A frame, if it was the last.
  Result<std::optional<Frame>> nextStage(ByteStream& stream);
  Status checkHeader() const;
  Status checkSizes() const;
  void beginBody(ByteStream& stream);

  const Limits& limits_;
  Stage stage_ = Stage::kHeader;
  std::array<char, sizeof(FrameHeader)> header_bytes_;
  FrameHeader header_;
  std::vector<uint64_t> layout_;
  Frame frame_;
  std::vector<Target> targets_;
  size_t next_ = 0;
};

}  // namespace torchrpc::native
