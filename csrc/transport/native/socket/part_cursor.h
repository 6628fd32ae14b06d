#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <sys/uio.h>

namespace torchrpc::native {

/// A position in the parts of a read or write.
class PartCursor {
 public:
  explicit PartCursor(std::span<const iovec> parts) : parts_(parts) { skipEmpty(); }
  bool atEnd() const { return parts_.empty(); }
  /// The rest of the current part.
  std::span<char> current() const {
    if (atEnd()) return {};
    return {static_cast<char*>(parts_.front().iov_base) + offset_, parts_.front().iov_len - offset_};
  }
  /// Copies the next bytes and returns their number. Does not advance.
  size_t copyTo(std::span<char> room) const {
    size_t bytes = 0;
    for (auto from = *this; bytes < room.size() && !from.atEnd();) {
      const auto part = from.current();
      const auto some = std::min(part.size(), room.size() - bytes);
      std::memcpy(room.data() + bytes, part.data(), some);
      bytes += some;
      from.advance(some);
    }
    return bytes;
  }
  /// Advances by `bytes`, or to the end if less is left.
  void advance(size_t bytes) {
    while (bytes > 0 && !atEnd()) {
      const auto some = std::min(bytes, parts_.front().iov_len - offset_);
      offset_ += some;
      bytes -= some;
      skipEmpty();
    }
  }

 private:
  void skipEmpty() {
    while (!parts_.empty() && offset_ == parts_.front().iov_len) {
      parts_ = parts_.subspan(1);
      offset_ = 0;
    }
  }
  std::span<const iovec> parts_;
  size_t offset_ = 0;
};

}  // namespace torchrpc::native
