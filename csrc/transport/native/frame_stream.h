#pragma once

// Writes frames to a byte stream and reads them from it. Copies only headers, and the bytes that one read returns
// together with a header. PROTOCOL.md specifies the bytes. Threads: one at a time.

#include <c10/util/SmallVector.h>

#include <array>
#include <deque>
#include <functional>
#include <span>
#include <string_view>
#include <sys/uio.h>
#include <utility>
#include <vector>

#include "transport/native/byte_stream.h"
#include "transport/transport.h"

namespace torchrpc::native {

/// Precedes each frame, little-endian. The layout follows: the size of each segment (u64) and, if one of them is in a
/// slab, the slab offset of each (u64). Then come the head and the segments that are in the stream.
struct FrameHeader {
  uint64_t head_bytes = 0;
  uint32_t segments = 0;
  uint32_t flags = 0;

  static constexpr uint32_t kSlabOffsets = 1;          ///< flag: slab offsets follow the sizes
  static constexpr uint64_t kInStream = ~uint64_t{0};  ///< instead of a slab offset
};

/// The queue of the frames to be written.
class FrameQueue {
 public:
  struct Outgoing {
    /// Copies large segments into slabs, if `stream` is given and has slabs. Any thread.
    Outgoing(Frame frame, SentHandler done, ByteStream* stream = nullptr);

    Frame frame;                    ///< without the segments that were copied into slabs
    std::vector<Segment> copied{};  ///< those segments, which are no longer needed
    SentHandler done;
    FrameHeader header;
    std::vector<uint64_t> layout{};  ///< sizes, and slab offsets

    /// The number of parts: header, layout, head, then the segments.
    size_t parts() const { return 3 + frame.segments.size(); }
    iovec part(size_t index) const;
    /// The size of all parts.
    size_t bytes() const;
    /// Fills `parts` with the parts that are not empty, from byte `skip` of the part `index` on, as many as fit.
    /// Returns their number.
    size_t gather(std::span<iovec> parts, size_t index = 0, size_t skip = 0) const;
  };

  using Sent = c10::SmallVector<Outgoing, 1>;  ///< the frames of one write: most often one, which needs no allocation

  void push(Outgoing&& outgoing) { queue_.push_back(std::move(outgoing)); }
  /// Puts a frame before all others. `bytes` of it have been written, and not all; of the others, none.
  void pushBegun(Outgoing&& outgoing, size_t bytes);
  bool empty() const { return queue_.empty(); }
  /// Fills `parts` with the next bytes to write, as many parts as fit. Returns the number of parts. They stay valid
  /// until advance() passes them.
  size_t gather(std::span<iovec> parts) const;
  /// Advances by bytes that have been written, and moves the frames that are complete to `sent`.
  void advance(size_t bytes, Sent& sent);
  std::vector<Outgoing> takeAll();

 private:
  std::deque<Outgoing> queue_;
  // The next byte of the first frame.
  size_t part_ = 0;
  size_t offset_ = 0;
};

/// Reads frames. Checks sizes, and their sum, against the limits before it allocates memory for them, and allocates the
/// memory as bytes arrive: see Note [Announced bytes]. If there is no memory for the segments of a frame, the frame is
/// delivered with its head and Frame::failure, and the frames that follow are not affected.
class FrameReader {
 public:
  /// Called with the beginning of the head of a large frame, and with the size of the whole frame. An error drops the
  /// frame as it arrives.
  using Announced = std::function<Status(std::string_view head_begin, uint64_t bytes)>;

  explicit FrameReader(const Limits& limits, Announced announced = {})
      : limits_(limits), announced_(std::move(announced)) {}

  /// The number of bytes of the current frame that are known to be missing.
  size_t missing() const;
  /// Fills `parts` with the memory for the next bytes: memory of the current frame, then `scratch` for all that
  /// follows. Returns the number of parts.
  size_t room(std::span<char> scratch, std::span<iovec> parts) const;
  /// Consumes bytes that have been read to the parts that room() returned. Calls `deliver` for each complete frame,
  /// until it returns false. `stream` provides the segments that are in slabs. Returns an error if the peer violates
  /// the protocol or the limits, or if there is no memory for a head or a layout.
  Status take(size_t bytes, std::span<char> scratch, ByteStream& stream, const std::function<bool(Frame&&)>& deliver);

 private:
  /// The next frame if it is small, has no segments, and has arrived whole: most have. Otherwise nullopt, and the
  /// stages take it. Moves `rest`, of `bytes` bytes, behind the frame.
  std::optional<Frame> takeWhole(const char*& rest, size_t& bytes) const;
  enum class Stage { kHeader, kLayout, kBody };
  struct Target {
    char* data;  ///< null: the bytes are dropped
    size_t bytes;
  };
  void begin(Stage stage);
  void addTarget(void* data, size_t bytes);
  /// Marks the next `bytes` of the targets as filled.
  void fill(size_t bytes);
  bool filled() const { return next_ == targets_.size(); }
  /// Begins the next stage, after all targets of this one have been filled. Returns the frame after the last stage.
  Result<std::optional<Frame>> nextStage(ByteStream& stream);
  Status checkHeader() const;
  void extendLayout();
  /// Checks all sizes and adds them up.
  Status beginBody();
  /// Whether memory has been allocated for all of the body.
  bool isExtended() const { return frame_.head.size() == header_.head_bytes && extended_ == header_.segments; }
  void extendBody(ByteStream& stream);
  /// Asks announced_ whether the frame, whose head has begun to arrive, is taken, and drops it if not.
  void announce(ByteStream& stream);
  void extendHead();
  void extendSegments(ByteStream& stream);
  /// Drops the segments that have memory, and the bytes still to come.
  void dropSegments(ByteStream& stream, Error failure);
  size_t layoutSize() const { return size_t{header_.segments} * (header_.flags != 0 ? 2 : 1); }
  /// Returns FrameHeader::kInStream if the segment is not in a slab.
  uint64_t slabOffset(size_t segment) const;

  const Limits& limits_;
  const Announced announced_;
  Stage stage_ = Stage::kHeader;
  std::array<char, sizeof(FrameHeader)> header_bytes_;
  FrameHeader header_;
  std::vector<uint64_t> layout_;
  Frame frame_;
  uint64_t unannounced_bytes_ = 0;  ///< all of a frame that is still to be announced; else 0
  size_t extended_ = 0;             ///< the number of segments that have memory or are dropped
  uint64_t rest_bytes_ = 0;         ///< bytes of the body in the stream that have no targets yet
  std::vector<Target> targets_;
  size_t next_ = 0;
};

}  // namespace torchrpc::native
