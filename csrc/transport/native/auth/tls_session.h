#pragma once

// TLS 1.3 over a non-blocking socket. Each side sends a certificate and verifies that of the other side.
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

  // Errors of these functions have the code kProtocol if the peer, or an attacker on the path, violates TLS, or if a
  // certificate is not valid; else kWorkerLost.
  /// Continues the handshake with the bytes that have arrived. Returns whether it is complete.
  Result<bool> handshake();
  bool isEstablished() const { return is_established_; }
  /// Returns the identity of the peer, which claims to be `name`: see TlsCredentials::identify. To be called after the
  /// handshake.
  PeerIdentity identify(const std::string& name) const { return credentials_.identify(name, peer_); }
  /// Returns bytes that only the two sides of this session have in common. To be called after the handshake.
  std::string channelBinding();
  /// Returns the name of the cipher, which is never freed. To be called after the handshake.
  const char* cipherName() const;

  /// Reads decrypted bytes. Returns their number; 0: none have arrived. Reads at most one record from the socket,
  /// unless readAhead() was called. Stores the descriptor that comes with the bytes, if there is one, in `passed`.
  Result<size_t> read(std::span<char> room, Descriptor* passed = nullptr);
  /// If false, the next read() returns 0, unless the socket becomes readable before.
  bool mayHaveMore() const { return !is_drained_ || library_.SSL_has_pending(ssl_.get()) == 1; }
  /// Lets read() receive more bytes from the socket than it returns.
  void readAhead();

  /// The most bytes that seal() encrypts.
  static constexpr size_t kMaxRecordBytes = 16 << 10;
  /// Encrypts bytes, which flush() sends. Returns false if OpenSSL fails.
  [[nodiscard]] bool seal(std::span<const char> plain);
  /// Encrypts the authenticated end of the stream (close_notify), which flush() sends.
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
  uint64_t records_ = 0;  ///< the number of records that have been sealed

  // The state of OpenSSL's input and output (makeBio()).
  std::string unsent_;            ///< encrypted bytes, not yet sent as a whole
  size_t sent_ = 0;               ///< the bytes of unsent_ that have been sent
  Descriptor* passed_ = nullptr;  ///< of the read() that is running, else null
  bool is_drained_ = false;       ///< the last receive found fewer bytes than it had room for
  int read_error_ = 0;            ///< errno of the socket; ECONNRESET at the end of the stream
};

}  // namespace torchrpc::native
