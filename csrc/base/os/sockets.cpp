#include "base/os/sockets.h"

#include <cerrno>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

namespace torchrpc::os {

#ifdef __linux__

int openSocket(int family, int type, Blocking blocking) {
  return ::socket(family, type | SOCK_CLOEXEC | (blocking == Blocking::kNo ? SOCK_NONBLOCK : 0), 0);
}

int acceptSocket(int listener) { return ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); }

void setKeepAliveIdle(int fd, int seconds) { ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof(seconds)); }

std::optional<uid_t> peerUserId(int fd) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return std::nullopt;
  return peer.uid;
}

#else

namespace {

/// Sets the options that Linux sets when it opens a socket. On failure closes the socket and returns -1 with errno.
int withOptions(int fd, Blocking blocking) {
  if (fd < 0) return fd;
  const int on = 1;
  const bool ready = ::fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 &&
      ::setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof(on)) == 0 &&
      (blocking == Blocking::kYes || ::fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
  if (ready) return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

}  // namespace

int openSocket(int family, int type, Blocking blocking) { return withOptions(::socket(family, type, 0), blocking); }

int acceptSocket(int listener) { return withOptions(::accept(listener, nullptr, nullptr), Blocking::kNo); }

void setKeepAliveIdle(int fd, int seconds) { ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPALIVE, &seconds, sizeof(seconds)); }

std::optional<uid_t> peerUserId(int fd) {
  uid_t user = 0;
  gid_t group = 0;
  if (::getpeereid(fd, &user, &group) != 0) return std::nullopt;
  return user;
}

#endif

}  // namespace torchrpc::os
