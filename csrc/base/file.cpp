#include "base/file.h"

#include <cerrno>
#include <fcntl.h>
#include <unistd.h>

namespace torchrpc {

File::File(const std::string& path, int flags, mode_t mode)
    : fd_(::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, mode)), error_(fd_ < 0 ? errno : 0) {}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

std::optional<struct stat> File::regularStatus() const {
  struct stat status{};
  if (::fstat(fd_, &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
  return status;
}

std::optional<std::string> File::read(size_t limit) const {
  std::string text(limit, '\0');
  for (size_t have = 0;;) {
    const auto got = have == limit ? 0 : ::read(fd_, text.data() + have, limit - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::nullopt;
    if (got == 0) return text.substr(0, have);
    have += static_cast<size_t>(got);
  }
}

bool File::write(std::string_view bytes) const {
  while (!bytes.empty()) {
    const auto written = ::write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

}  // namespace torchrpc
