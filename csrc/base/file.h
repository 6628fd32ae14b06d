#pragma once

// Reads or writes a file, and waits for no other process, even if the file is a FIFO. Threads: one at a time.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <sys/stat.h>

namespace torchrpc {

/// An open file, closed at the end of its scope.
class File {
 public:
  /// Calls ::open() with O_CLOEXEC and O_NONBLOCK. Without the latter, opening a FIFO would wait for its other end.
  explicit File(const std::string& path, int flags, mode_t mode = 0);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  /// The errno of ::open(); 0 if the file is open.
  int error() const { return error_; }
  /// Returns the status of the file; nullopt if it is no regular file.
  std::optional<struct stat> regularStatus() const;
  /// Reads the first `limit` bytes, or all if there are fewer. Returns nullopt, with errno, if the file cannot be read.
  std::optional<std::string> read(size_t limit) const;
  /// Writes all bytes. Returns false if it could not.
  bool write(std::string_view bytes) const;

 private:
  const int fd_;
  const int error_;
};

}  // namespace torchrpc
