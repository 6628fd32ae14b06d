#include "base/os/process_copy.h"

#ifdef __linux__

#include <array>
#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace torchrpc::os {

namespace {

std::string readUntil(int fd, size_t most, TimePoint deadline) {
  std::string out;
  std::array<char, 4096> buffer;
  while (out.size() < most) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(timeUntil(deadline)).count();
    pollfd ready{.fd = fd, .events = POLLIN, .revents = 0};
    const int count = left > 0 ? ::poll(&ready, 1, static_cast<int>(left)) : 0;
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return {};
    const auto size = ::read(fd, buffer.data(), buffer.size());
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) break;
    out.append(buffer.data(), static_cast<size_t>(size));
  }
  return out;
}

}  // namespace

std::string outputOfCopy(void (*write)(int fd), size_t most, Duration timeout) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return {};
  // Not fork(): it would run the pthread_atfork() handlers, which lock mutexes, and the program would receive SIGCHLD.
  const auto child = static_cast<pid_t>(::syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr));
  if (child == 0) {
    write(ends[1]);
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string out;
  if (child > 0) {
    out = readUntil(ends[0], most, deadlineAfter(timeout));
    ::kill(child, SIGKILL);
    while (::waitpid(child, nullptr, __WALL) < 0 && errno == EINTR) {
    }
  }
  ::close(ends[0]);
  return out;
}

}  // namespace torchrpc::os

#else

namespace torchrpc::os {

std::string outputOfCopy(void (* /*write*/)(int fd), size_t /*most*/, Duration /*timeout*/) { return {}; }

}  // namespace torchrpc::os

#endif
