// Note [Announced bytes]
// A header of 16 bytes can announce a head of gigabytes and a million segments. A peer that sends only the announcement
// must not occupy memory on the receiver. So FrameReader allocates memory as bytes arrive:
// - The head and the layout grow in steps. Each step is filled before the next one is allocated.
// - Segments are allocated a few at a time, after the segments before them have been filled. Each segment is allocated
//   as a whole, because a tensor cannot move, but its pages occupy memory only when they are written. (Its address
//   space is bounded by Limits::segment_bytes. Where the system does not overcommit memory, an allocation that is too
//   large fails, and only this frame is lost.)
// A peer may send over several connections, so its bound is that of one connection times their number (Quota).
// When the first bytes of the head of a frame of kMinAnnouncedBytes or more have arrived, the layers above are asked
// whether they take it: they charge all of it to the peer's quota. A frame that they refuse occupies only these bytes.

#include "transport/native/frame_stream.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "transport/frame_memory.h"

namespace torchrpc::native {

namespace {

// The number of entries of the layout after the first step. Each further step doubles it.
constexpr size_t kLayoutStep = 16 << 10;
// The head grows by this much, within a capacity that starts at kMinHeadCapacity (or at the size of the head, if that
// is smaller) and doubles. Pages of the capacity that have not been written occupy no memory.
constexpr uint64_t kHeadStepBytes = 1 << 20;
constexpr uint64_t kMinHeadCapacity = 64 << 20;
// One step allocates segments until they have this many bytes, or are this many. One read fills fewer.
constexpr uint64_t kMaxAheadBytes = 16 << 20;
constexpr size_t kMaxAheadSegments = 256;
// The bytes of the head with which a frame is announced.
constexpr uint64_t kAnnouncedHeadBytes = 64;

}  // namespace

// ---- writing ----

FrameQueue::Outgoing::Outgoing(Frame whole, SentHandler done, ByteStream* stream)
    : frame(std::move(whole)),
      done(std::move(done)),
      header{frame.head.size(), static_cast<uint32_t>(frame.segments.size()), 0} {
  auto& segments = frame.segments;
  layout.reserve(2 * segments.size());
  for (const auto& segment : segments) layout.push_back(segment.bytes);
  if (!stream) return;
  for (size_t i = 0; i < segments.size(); ++i) {
    const auto slab_offset = stream->copyToSlab(segments[i]);
    if (!slab_offset) continue;
    header.flags = FrameHeader::kSlabOffsets;
    layout.resize(2 * segments.size(), FrameHeader::kInStream);
    layout[segments.size() + i] = *slab_offset;
    copied.push_back(std::exchange(segments[i], {}));
  }
  std::erase_if(segments, [](const Segment& segment) { return !segment.storage; });
}

iovec FrameQueue::Outgoing::part(size_t index) const {
  const auto of = [](const void* data, size_t bytes) { return iovec{const_cast<void*>(data), bytes}; };
  if (index == 0) return of(&header, sizeof(header));
  if (index == 1) return of(layout.data(), layout.size() * sizeof(uint64_t));
  if (index == 2) return of(frame.head.data(), frame.head.size());
  return of(frame.segments[index - 3].data(), frame.segments[index - 3].bytes);
}

size_t FrameQueue::Outgoing::bytes() const {
  size_t bytes = 0;
  for (size_t index = 0; index < parts(); ++index) bytes += part(index).iov_len;
  return bytes;
}

size_t FrameQueue::Outgoing::gather(std::span<iovec> parts, size_t index, size_t skip) const {
  size_t used = 0;
  for (; index < this->parts() && used < parts.size(); ++index) {
    const auto next = part(index);
    if (next.iov_len == 0) continue;
    parts[used++] = {static_cast<char*>(next.iov_base) + skip, next.iov_len - skip};
    skip = 0;
  }
  return used;
}

void FrameQueue::pushBegun(Outgoing&& outgoing, size_t bytes) {
  queue_.push_front(std::move(outgoing));
  Sent none;
  advance(bytes, none);
}

size_t FrameQueue::gather(std::span<iovec> parts) const {
  size_t used = 0, index = part_, skip = offset_;
  for (const auto& outgoing : queue_) {
    used += outgoing.gather(parts.subspan(used), index, skip);
    if (used == parts.size()) break;
    index = skip = 0;
  }
  return used;
}

void FrameQueue::advance(size_t bytes, Sent& sent) {
  while (!queue_.empty()) {
    auto& first = queue_.front();
    const auto left = first.part(part_).iov_len - offset_;
    if (bytes < left) {
      offset_ += bytes;
      return;
    }
    bytes -= left;
    offset_ = 0;
    if (++part_ < first.parts()) continue;
    part_ = 0;
    sent.push_back(std::move(first));
    queue_.pop_front();
  }
}

std::vector<FrameQueue::Outgoing> FrameQueue::takeAll() {
  std::vector<Outgoing> all(std::make_move_iterator(queue_.begin()), std::make_move_iterator(queue_.end()));
  queue_.clear();
  return all;
}

// ---- reading ----

void FrameReader::addTarget(void* data, size_t bytes) {
  if (bytes > 0) targets_.push_back({static_cast<char*>(data), bytes});
}

void FrameReader::begin(Stage stage) {
  stage_ = stage;
  targets_.clear();
  next_ = 0;
}

size_t FrameReader::missing() const {
  size_t bytes = 0;
  for (size_t i = next_; i < targets_.size(); ++i) bytes += targets_[i].bytes;
  return bytes + rest_bytes_;
}

size_t FrameReader::room(std::span<char> scratch, std::span<iovec> parts) const {
  size_t used = 0;
  // A header is small: it is read to scratch, so that the same read returns the bytes after it.
  if (stage_ != Stage::kHeader) {
    for (size_t i = next_; i < targets_.size() && used + 1 < parts.size(); ++i) {
      const auto& target = targets_[i];
      if (!target.data) {
        parts[used++] = {scratch.data(), std::min(target.bytes, scratch.size())};
        return used;
      }
      parts[used++] = {target.data, target.bytes};
    }
    // The bytes after these targets belong to targets that do not exist yet. Read to scratch, they would be copied.
    if (next_ + used < targets_.size() || rest_bytes_ > 0) return used;
  }
  parts[used++] = {scratch.data(), scratch.size()};
  return used;
}

void FrameReader::fill(size_t bytes) {
  while (bytes > 0) {
    auto& target = targets_[next_];
    const auto filled = std::min(bytes, target.bytes);
    if (target.data) target.data += filled;
    target.bytes -= filled;
    bytes -= filled;
    if (target.bytes == 0) ++next_;
  }
}

Status FrameReader::take(
    size_t bytes, std::span<char> scratch, ByteStream& stream, const std::function<bool(Frame&&)>& deliver) {
  if (stage_ != Stage::kHeader) {
    size_t open = 0;
    for (size_t i = next_; i < targets_.size() && open < bytes; ++i) open += targets_[i].bytes;
    const auto direct = std::min(open, bytes);
    fill(direct);
    bytes -= direct;
  }
  const char* rest = scratch.data();
  for (;;) {
    if (auto frame = takeWhole(rest, bytes)) {
      if (!deliver(*std::move(frame))) return std::nullopt;
      continue;
    }
    while (!filled() && bytes > 0) {
      const auto copied = std::min(bytes, targets_[next_].bytes);
      if (targets_[next_].data) std::memcpy(targets_[next_].data, rest, copied);
      fill(copied);
      rest += copied;
      bytes -= copied;
    }
    if (stage_ == Stage::kHeader && targets_.empty()) {
      if (bytes == 0) return std::nullopt;
      addTarget(header_bytes_.data(), header_bytes_.size());
      continue;
    }
    if (!filled()) return std::nullopt;
    auto frame = nextStage(stream);
    if (!frame) return frame.error();
    if (frame.value() && !deliver(*std::move(frame).value())) return std::nullopt;
  }
}

std::optional<Frame> FrameReader::takeWhole(const char*& rest, size_t& bytes) const {
  constexpr uint64_t kMostBytes = 4096;
  static_assert(kMostBytes < kMinAnnouncedBytes);
  if (stage_ != Stage::kHeader || !targets_.empty() || bytes < sizeof(FrameHeader)) return std::nullopt;
  FrameHeader header;
  std::memcpy(&header, rest, sizeof(header));
  const bool is_small = header.segments == 0 && header.flags == 0 && header.head_bytes <= kMostBytes;
  if (!is_small || header.head_bytes > std::min(limits_.head_bytes, limits_.frame_bytes)) return std::nullopt;
  const auto whole = sizeof(header) + header.head_bytes;
  if (bytes < whole) return std::nullopt;
  std::optional<Frame> frame(std::in_place);
  frame->head.assign(rest + sizeof(header), header.head_bytes);
  rest += whole;
  bytes -= whole;
  return frame;
}

Status FrameReader::checkHeader() const {
  if ((header_.flags & ~FrameHeader::kSlabOffsets) != 0) {
    return Error(ErrorCode::kProtocol, "a frame header has unknown flags");
  }
  if (header_.segments <= limits_.tensors) return checkSize("head", header_.head_bytes, limits_.head_bytes);
  return Error(ErrorCode::kFrameTooLarge, "a message of more than " + std::to_string(limits_.tensors) + " segments");
}

void FrameReader::extendLayout() {
  const size_t had = layout_.size();
  layout_.resize(std::min(layoutSize(), std::max(kLayoutStep, 2 * had)));
  begin(Stage::kLayout);
  addTarget(layout_.data() + had, (layout_.size() - had) * sizeof(uint64_t));
}

Status FrameReader::beginBody() {
  FrameSize size(limits_);
  if (auto error = size.add("head", header_.head_bytes, limits_.head_bytes)) return error;
  rest_bytes_ = header_.head_bytes;
  for (size_t i = 0; i < header_.segments; ++i) {
    if (auto error = size.add("segment", layout_[i], limits_.segment_bytes)) return error;
    if (slabOffset(i) == FrameHeader::kInStream) rest_bytes_ += layout_[i];
  }
  extended_ = 0;
  unannounced_bytes_ = announced_ && size.bytes() >= kMinAnnouncedBytes ? size.bytes() : 0;
  return std::nullopt;
}

void FrameReader::announce(ByteStream& stream) {
  auto refused = announced_(frame_.head, std::exchange(unannounced_bytes_, 0));
  if (!refused) return;
  dropSegments(stream, *std::move(refused));
  header_.head_bytes = frame_.head.size();
}

void FrameReader::extendBody(ByteStream& stream) {
  begin(Stage::kBody);
  if (unannounced_bytes_ > 0 && frame_.head.size() >= std::min(header_.head_bytes, kAnnouncedHeadBytes)) {
    announce(stream);
    if (frame_.failure) return;
  }
  extendHead();
  if (unannounced_bytes_ > 0 || frame_.head.size() < header_.head_bytes) return;
  const size_t head_targets = targets_.size();
  const auto rest_bytes = rest_bytes_;
  try {
    extendSegments(stream);
  } catch (const Error&) {
    throw;  // the peer violates the protocol
  } catch (const std::exception&) {
    targets_.resize(head_targets);
    rest_bytes_ = rest_bytes;
    uint64_t bytes = 0;
    for (size_t i = 0; i < header_.segments; ++i) {
      if (slabOffset(i) == FrameHeader::kInStream) bytes += layout_[i];
    }
    dropSegments(
        stream,
        {ErrorCode::kFrameTooLarge,
         "the receiver has no memory for a message with " + std::to_string(bytes) + " bytes of tensors"});
  }
}

void FrameReader::extendHead() {
  auto& head = frame_.head;
  const size_t had = head.size();
  const auto step = unannounced_bytes_ > 0 ? kAnnouncedHeadBytes : kHeadStepBytes;
  const uint64_t bytes = had + std::min(header_.head_bytes - had, step);
  if (bytes == had) return;
  if (unannounced_bytes_ == 0 && bytes > head.capacity())
    head.reserve(std::min(header_.head_bytes, std::max(2 * bytes, kMinHeadCapacity)));
  head.resize(bytes);
  addTarget(head.data() + had, bytes - had);
  rest_bytes_ -= bytes - had;
}

uint64_t FrameReader::slabOffset(size_t segment) const {
  return header_.flags != 0 ? layout_[header_.segments + segment] : FrameHeader::kInStream;
}

void FrameReader::extendSegments(ByteStream& stream) {
  uint64_t ahead = 0;
  for (size_t count = 0; extended_ < header_.segments; ++extended_, ++count) {
    const auto bytes = layout_[extended_];
    const auto slab_offset = slabOffset(extended_);
    const bool in_slab = slab_offset != FrameHeader::kInStream;
    if (ahead >= kMaxAheadBytes || count >= kMaxAheadSegments) return;
    frame_.segments.push_back(in_slab ? stream.leaseFromSlab(slab_offset, bytes) : newSegment(bytes));
    if (in_slab) continue;
    addTarget(frame_.segments.back().mutableData(), bytes);
    rest_bytes_ -= bytes;
    ahead += bytes;
  }
}

void FrameReader::dropSegments(ByteStream& stream, Error failure) {
  const size_t allocated = frame_.segments.size();
  frame_.segments = {};
  for (size_t i = 0; i < header_.segments; ++i) {
    const auto slab_offset = slabOffset(i);
    if (slab_offset == FrameHeader::kInStream || i < allocated) continue;
    stream.leaseFromSlab(slab_offset, layout_[i]);  // the end of the lease returns the slab to the peer
  }
  addTarget(nullptr, rest_bytes_);
  extended_ = header_.segments;
  rest_bytes_ = 0;
  frame_.failure = std::make_shared<Error>(std::move(failure));
}

Result<std::optional<Frame>> FrameReader::nextStage(ByteStream& stream) try {
  switch (stage_) {
    case Stage::kHeader:
      std::memcpy(&header_, header_bytes_.data(), sizeof(header_));
      if (auto error = checkHeader()) return *std::move(error);
      layout_.clear();
      extendLayout();
      break;
    case Stage::kLayout:
      if (layout_.size() < layoutSize()) {
        extendLayout();
        break;
      }
      if (auto error = beginBody()) return *std::move(error);
      extendBody(stream);
      break;
    case Stage::kBody:
      if (!isExtended()) {
        extendBody(stream);
        break;
      }
      begin(Stage::kHeader);
      return std::optional<Frame>(std::exchange(frame_, {}));
  }
  return std::optional<Frame>();
} catch (const Error& error) {
  return error;
} catch (const std::exception& failure) {
  return Error(ErrorCode::kFrameTooLarge, std::string("no memory for a message: ") + failure.what());
}

}  // namespace torchrpc::native
