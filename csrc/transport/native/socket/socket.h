#pragma once

// Sockets as the native transport uses them: non-blocking, closed on exec, no signals.

#include <cstdint>
#include <optional>
#include <string>
#include <sys/socket.h>
#include <sys/types.h>
#include <utility>

namespace torchrpc::native {

/// Owns a descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// Where a socket listens or connects to.
class SocketAddress {
 public:
  /// "10.0.0.1:80", "[fd00::2]:80"; nothing for any other text: no name is looked up.
  static std::optional<SocketAddress> tcp(const std::string& host_and_port);
  /// An abstract Unix socket; nothing for a name too long. An empty name stands for no socket and is accepted.
  static std::optional<SocketAddress> abstract(const std::string& name);

  /// A non-blocking socket of this kind; invalid, with errno, if there is none to be had.
  Descriptor socket() const;
  /// A socket that listens here. Throws Error(kRendezvous) with `text`.
  Descriptor listen(const std::string& text) const;
  /// As ::connect, but EINTR is seen to: 0, or errno.
  int connect(int fd) const;
  /// With the port that the system chose.
  static std::string textOf(int fd);
  bool isTcp() const { return storage_.ss_family != AF_UNIX; }

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

/// For a TCP connection: no delay, a word from the kernel when the host at the other end has gone silently, and buffers
/// that suit a peer on this host.
void tuneTcp(int fd);

/// What a failed connection attempt leaves behind; 0 if it succeeded.
int socketError(int fd);

/// strerror of what went wrong with a connection, in words for users where we have better ones.
std::string socketErrorText(int error);

/// Sends all of a small message, with a descriptor if there is one (Unix sockets). 0, or errno.
int sendSmall(int fd, const std::string& bytes, int descriptor = -1);

/// recv(), and the descriptor that came with the bytes, if any and if `descriptor` is given; more are closed.
ssize_t receive(int fd, void* data, size_t bytes, Descriptor* descriptor = nullptr);

}  // namespace torchrpc::native
