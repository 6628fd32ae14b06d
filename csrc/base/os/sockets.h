#pragma once

// Sockets that are closed on exec and raise no SIGPIPE. Linux sets this by flags of the calls that open or use a
// socket, macOS by options of the socket. Threads: any.

#include <optional>
#include <sys/socket.h>
#include <sys/types.h>

namespace torchrpc::os {

enum class Blocking : bool { kNo, kYes };

/// Calls socket(). Returns the descriptor, negative with errno on failure.
int openSocket(int family, int type, Blocking blocking);
/// Calls accept(). Returns the descriptor of a non-blocking socket, negative with errno on failure.
int acceptSocket(int listener);

/// The flags for send() and sendmsg(), and for recvmsg().
#ifdef __linux__
constexpr int kSendFlags = MSG_NOSIGNAL;
constexpr int kReceiveFlags = MSG_CMSG_CLOEXEC;
#else
constexpr int kSendFlags = 0;     // openSocket() and acceptSocket() set SO_NOSIGPIPE
constexpr int kReceiveFlags = 0;  // descriptors arrive with shared memory only, which only Linux has
#endif
/// Returns the effective user id of the process at the other end of a Unix socket: the one that connected or, on the
/// side that connected, the one that listens.
std::optional<uid_t> peerUserId(int fd);

/// Sets the seconds without traffic before the first keep-alive probe of a TCP connection.
void setKeepAliveIdle(int fd, int seconds);

}  // namespace torchrpc::os
