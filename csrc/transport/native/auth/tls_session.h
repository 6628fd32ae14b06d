#pragma once

// TLS 1.3 over a non-blocking socket. Both sides send a certificate, and check the other's.
// Threads: one at a time.

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/result.h"
#include "transport/native/auth/noise.h"
#include "transport/native/auth/tls_credentials.h"
#include "transport/native/socket/socket.h"

namespace torchrpc::native {

class TlsSession {
 public:
  /// `socket` and `credentials` must outlive the session.
  TlsSession(const TlsCredentials& credentials, int socket, Side side);
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // An error of the functions that return one has the code kProtocol if the peer, or someone on the way, does what TLS
  // does not permit, or if a certificate is not valid; else kWorkerLost.
  /// Takes part in the handshake as far as bytes have come. Whether it is complete.
  Result<bool> handshake();
  bool isEstablished() const { return is_established_; }
  /// Who the peer is, if it calls itself so: see TlsCredentials::identify. After the handshake.
  PeerIdentity identify(const std::string& name) const { return credentials_.identify(name, peer_); }
  /// Only the two sides of this session have the same. After the handshake.
  std::string channelBinding();
  /// The name of the cipher, which is never freed. After the handshake.
  const char* cipherName() const;

  /// The number of bytes; 0: none have come. Reads from the socket not more than one record, unless readAhead(). The
  /// descriptor that comes with the bytes, if there is one, goes to `passed`.
  Result<size_t> read(std::span<char> room, Descriptor* passed = nullptr);
  /// False: the next read() returns 0, unless the socket becomes readable before.
  bool mayHaveMore() const { return !is_drained_ || library_.SSL_has_pending(ssl_.get()) == 1; }
  /// From now on, read() may take more from the socket than it returns.
  void readAhead();

  /// Encrypts at most kMaxRecordBytes, which flush() sends.
  static constexpr size_t kMaxRecordBytes = 16 << 10;
  [[nodiscard]] bool seal(std::span<const char> plain);
  /// Says in an authenticated way that no more bytes follow; flush() sends that.
  void end();
  /// Sends what has been encrypted, with a descriptor unless that is negative. Returns 0 if nothing is left, or errno;
  /// EAGAIN: the socket has no room.
  int flush(int descriptor = -1);

 private:
  Error errorOf(int result);
  static Libssl::BIO* makeBio(const Libssl& library, TlsSession* self);

  const TlsCredentials& credentials_;
  const Libssl& library_;
  const TlsCredentials::Context context_;
  const int socket_;
  const std::unique_ptr<Libssl::SSL, void (*)(Libssl::SSL*)> ssl_;
  bool is_established_ = false;
  TlsNames peer_;
  uint64_t records_ = 0;  ///< that have been sealed

  // Of the input and output of OpenSSL.
  std::string unsent_;            ///< encrypted bytes
  size_t sent_ = 0;               ///< of these
  Descriptor* passed_ = nullptr;  ///< while read() runs
  bool is_drained_ = false;       ///< the socket had fewer bytes than there was room for
  int read_error_ = 0;            ///< of the socket; ECONNRESET at its end
};

}  // namespace torchrpc::native
