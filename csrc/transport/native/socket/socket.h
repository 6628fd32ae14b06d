#pragma once

// Sockets of the native transport: non-blocking, closed on exec, and writing to them raises no SIGPIPE.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <sys/socket.h>
#include <sys/types.h>
#include <utility>

#include "base/process.h"

namespace torchrpc::native {

/// Owns a file descriptor. A forked child does not inherit it: see Note [Forked children].
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), maker_(other.maker_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(maker_, other.maker_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
  MakerProcess maker_;
};

/// An address to listen on or to connect to.
class SocketAddress {
 public:
  /// Parses "10.0.0.1:80" or "[fd00::2]:80"; returns nothing for any other text. Does not resolve names.
  static std::optional<SocketAddress> tcp(const std::string& host_and_port);
  /// The address of an abstract Unix socket; nothing if the name is too long. An empty name is accepted and means no
  /// socket.
  static std::optional<SocketAddress> abstract(const std::string& name);

  /// Opens a socket of this address's family. Returns an invalid descriptor, with errno set, if that fails.
  Descriptor socket() const;
  /// Opens a socket that listens on this address. Throws Error(kRendezvous), which calls the address `text`, if that
  /// fails.
  Descriptor listen(const std::string& text) const;
  /// Calls ::connect, again after EINTR. Returns 0 or errno.
  int connect(int fd) const;
  /// The local address of a socket, with the port that the system chose.
  static std::string textOf(int fd);
  /// The numeric host of the other end of a connected socket; empty if there is none (any more).
  static std::string hostOfPeer(int fd);
  bool isTcp() const { return storage_.ss_family != AF_UNIX; }

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

/// Sets the options of a TCP connection: no delay, keep-alive probes that detect a host that no longer answers, and a
/// send buffer that is right for peers on this host.
void tuneTcp(int fd);

/// Returns the error of a connection attempt that has ended (SO_ERROR); 0 if it succeeded.
int socketError(int fd);

/// Describes an errno value of a connection: by strerror, or by a clearer text for common errors.
std::string socketErrorText(int error);

/// As send(). Also passes `descriptor` (SCM_RIGHTS, Unix sockets only) unless it is negative.
ssize_t sendSome(int fd, std::span<const char> bytes, int descriptor = -1);

/// Sends a small message as a whole, with a descriptor as sendSome() does. Returns 0 or errno.
int sendSmall(int fd, const std::string& bytes, int descriptor = -1);

/// As recv(). Stores the descriptor (SCM_RIGHTS) that came with the bytes, if any, in `descriptor` unless that is null,
/// and closes further descriptors.
ssize_t receive(int fd, void* data, size_t bytes, Descriptor* descriptor = nullptr);

}  // namespace torchrpc::native
