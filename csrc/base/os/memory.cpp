#include "base/os/memory.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace torchrpc::os {

#ifdef __linux__

namespace {
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
}  // namespace

int openSharedMemory() { return ::memfd_create("torchrpc", MFD_CLOEXEC | MFD_ALLOW_SEALING); }

int openSealedFile(const char* name, std::string_view contents) {
  const int fd = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return -1;
  const bool is_written = ::write(fd, contents.data(), contents.size()) == static_cast<ssize_t>(contents.size());
  if (is_written && ::fcntl(fd, F_ADD_SEALS, kSeals | F_SEAL_WRITE) == 0) return fd;
  ::close(fd);
  return -1;
}

bool setSizeAndSeal(int fd, size_t bytes) {
  return ::ftruncate(fd, static_cast<off_t>(bytes)) == 0 && ::fcntl(fd, F_ADD_SEALS, kSeals) == 0;
}

bool isSealed(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);  // -1, in which all bits are set, for a file that cannot have seals
  return seals >= 0 && (seals & kSeals) == kSeals;
}

bool discardSharedPages(std::span<char> memory) { return ::madvise(memory.data(), memory.size(), MADV_REMOVE) == 0; }

bool moveMapping(void* from, size_t bytes, void* to) {
  return ::mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED;
}

void requestHugePages(void* memory, size_t bytes) { ::madvise(memory, bytes, MADV_HUGEPAGE); }

#else

int openSharedMemory() {
  errno = ENOSYS;
  return -1;
}

int openSealedFile(const char* /*name*/, std::string_view /*contents*/) {
  errno = ENOSYS;
  return -1;
}

bool setSizeAndSeal(int /*fd*/, size_t /*bytes*/) { return false; }
bool isSealed(int /*fd*/) { return false; }
bool discardSharedPages(std::span<char> /*memory*/) { return false; }
bool moveMapping(void* /*from*/, size_t /*bytes*/, void* /*to*/) { return false; }
void requestHugePages(void* /*memory*/, size_t /*bytes*/) {}

#endif

}  // namespace torchrpc::os
