#pragma once

// A file that is read or written as a whole, or in lines, without a wait. Threads: one at a time.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <sys/stat.h>

namespace torchrpc {

/// An open file, closed at the end of its scope.
class File {
 public:
  /// As ::open(), with O_CLOEXEC, and with O_NONBLOCK: to open a FIFO would otherwise wait for its other end.
  explicit File(const std::string& path, int flags, mode_t mode = 0);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  /// errno of opening it; 0: it is open.
  int error() const { return error_; }
  /// Nothing if it is no regular file.
  std::optional<struct stat> regularStatus() const;
  /// The first `limit` bytes; all, if there are fewer. Nothing if it cannot be read: then errno says why.
  std::optional<std::string> read(size_t limit) const;
  /// False if not all bytes could be written.
  bool write(std::string_view bytes) const;

 private:
  const int fd_;
  const int error_;
};

}  // namespace torchrpc
