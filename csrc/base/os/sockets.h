#pragma once

// Sockets that are closed on exec and raise no SIGPIPE: Linux says so in the call that opens or uses a socket, macOS by
// options of the socket.
// Threads: any.

#include <optional>
#include <sys/socket.h>
#include <sys/types.h>

namespace torchrpc::os {

enum class Blocking : bool { kNo, kYes };

/// socket(). Negative with errno if the system has none left.
int openSocket(int family, int type, Blocking blocking);
/// accept(), with a socket that does not block. Negative with errno if there is none.
int acceptSocket(int listener);

/// The flags of send() and of recv().
#ifdef __linux__
constexpr int kSendFlags = MSG_NOSIGNAL;
constexpr int kReceiveFlags = MSG_CMSG_CLOEXEC;
#else
constexpr int kSendFlags = 0;     // openSocket() and acceptSocket() set SO_NOSIGPIPE
constexpr int kReceiveFlags = 0;  // descriptors arrive with shared memory only, which only Linux has
#endif
/// The effective user id of the process that connected a Unix socket or, on the side that connected, that listens.
std::optional<uid_t> peerUserId(int fd);

/// Sets the seconds without traffic before the first keep-alive probe of a TCP connection.
void setKeepAliveIdle(int fd, int seconds);

}  // namespace torchrpc::os
