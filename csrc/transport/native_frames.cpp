#include "transport/native_frames.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/frame_memory.h"

namespace torchrpc {

// ---- out ----

iovec NativeFrameQueue::Outgoing::part(size_t index) const {
  const auto of = [](const void* data, size_t bytes) { return iovec{const_cast<void*>(data), bytes}; };
  if (index == 0) return of(&header, sizeof(header));
  if (index == 1) return of(sizes.data(), sizes.size() * sizeof(uint64_t));
  if (index == 2) return of(frame.head.data(), frame.head.size());
  return of(frame.segments[index - 3].data(), frame.segments[index - 3].bytes);
}

void NativeFrameQueue::push(Frame frame, std::function<void(Status)> done) {
  auto& outgoing = queue_.emplace_back(Outgoing{std::move(frame), std::move(done)});
  outgoing.header = {outgoing.frame.head.size(), static_cast<uint32_t>(outgoing.frame.segments.size()), 0};
  for (const auto& segment : outgoing.frame.segments) outgoing.sizes.push_back(segment.bytes);
}

size_t NativeFrameQueue::gather(std::span<iovec> parts) const {
  size_t used = 0, index = part_, skip = offset_;
  for (const auto& outgoing : queue_) {
    for (; index < outgoing.parts(); ++index) {
      const auto part = outgoing.part(index);
      if (part.iov_len == 0) continue;
      if (used == parts.size()) return used;
      parts[used++] = {static_cast<char*>(part.iov_base) + skip, part.iov_len - skip};
      skip = 0;
    }
    index = 0;
  }
  return used;
}

void NativeFrameQueue::advance(size_t bytes, std::vector<Outgoing>& gone) {
  while (!queue_.empty()) {
    auto& first = queue_.front();
    const auto rest = first.part(part_).iov_len - offset_;
    if (bytes < rest) {
      offset_ += bytes;
      return;
    }
    bytes -= rest;
    offset_ = 0;
    if (++part_ < first.parts()) continue;
    part_ = 0;
    gone.push_back(std::move(first));
    queue_.pop_front();
  }
}

std::vector<NativeFrameQueue::Outgoing> NativeFrameQueue::takeAll() {
  std::vector<Outgoing> all(std::make_move_iterator(queue_.begin()), std::make_move_iterator(queue_.end()));
  queue_.clear();
  return all;
}

// ---- in ----

void NativeFrameReader::addTarget(void* data, size_t bytes) {
  if (bytes > 0) targets_.push_back({static_cast<char*>(data), bytes});
}

void NativeFrameReader::begin(Stage stage) {
  stage_ = stage;
  targets_.clear();
  next_ = 0;
}

size_t NativeFrameReader::missing() const {
  size_t bytes = 0;
  for (size_t i = next_; i < targets_.size(); ++i) bytes += targets_[i].bytes;
  return bytes;
}

size_t NativeFrameReader::room(std::span<char> scratch, std::span<iovec> parts) const {
  size_t used = 0;
  // A header is so small that the bytes behind it are better read in the same go, which only scratch has room for.
  if (stage_ != Stage::kHeader) {
    for (size_t i = next_; i < targets_.size() && used + 1 < parts.size(); ++i) {
      parts[used++] = {targets_[i].data, targets_[i].bytes};
    }
    if (next_ + used < targets_.size()) return used;
  }
  parts[used++] = {scratch.data(), scratch.size()};
  return used;
}

void NativeFrameReader::fill(size_t bytes) {
  while (bytes > 0) {
    auto& target = targets_[next_];
    const auto filled = std::min(bytes, target.bytes);
    target.data += filled;
    target.bytes -= filled;
    bytes -= filled;
    if (target.bytes == 0) ++next_;
  }
}

Status NativeFrameReader::take(size_t bytes, std::span<char> scratch, const std::function<bool(Frame)>& deliver) {
  if (stage_ != Stage::kHeader) {
    size_t open = 0;
    for (size_t i = next_; i < targets_.size() && open < bytes; ++i) open += targets_[i].bytes;
    const auto direct = std::min(open, bytes);
    fill(direct);
    bytes -= direct;
  }
  const char* rest = scratch.data();
  for (;;) {
    while (!filled() && bytes > 0) {
      const auto copied = std::min(bytes, targets_[next_].bytes);
      std::memcpy(targets_[next_].data, rest, copied);
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
    auto frame = nextStage();
    if (!frame) return frame.error();
    if (frame.value() && !deliver(*std::move(frame).value())) return std::nullopt;
  }
}

Status NativeFrameReader::checkSizes() const {
  for (const auto bytes : sizes_) {
    if (auto error = checkSize("segment", bytes, limits_.segment_bytes)) return error;
  }
  return std::nullopt;
}

Result<std::optional<Frame>> NativeFrameReader::nextStage() try {
  switch (stage_) {
    case Stage::kHeader:
      std::memcpy(&header_, header_bytes_.data(), sizeof(header_));
      if (header_.flags != 0) return Error(ErrorCode::kProtocol, "a frame with flags that do not exist");
      if (auto error = checkSize("head", header_.head_bytes, limits_.head_bytes)) return *std::move(error);
      if (header_.segments > limits_.tensors) {
        return Error(
            ErrorCode::kFrameTooLarge, "a message of more than " + std::to_string(limits_.tensors) + " segments");
      }
      begin(Stage::kSizes);
      sizes_.resize(header_.segments);
      addTarget(sizes_.data(), sizes_.size() * sizeof(uint64_t));
      return std::optional<Frame>();
    case Stage::kSizes:
      if (auto error = checkSizes()) return *std::move(error);
      begin(Stage::kBody);
      frame_.head.resize(header_.head_bytes);
      addTarget(frame_.head.data(), frame_.head.size());
      frame_.segments.reserve(sizes_.size());
      for (const auto bytes : sizes_) {
        frame_.segments.push_back(newSegment(bytes));
        addTarget(frame_.segments.back().mutableData(), bytes);
      }
      return std::optional<Frame>();
    case Stage::kBody: begin(Stage::kHeader); return std::optional<Frame>(std::exchange(frame_, {}));
  }
  return std::optional<Frame>();
} catch (const std::exception& failure) {
  return Error(ErrorCode::kFrameTooLarge, std::string("no memory for a message: ") + failure.what());
}

}  // namespace torchrpc
