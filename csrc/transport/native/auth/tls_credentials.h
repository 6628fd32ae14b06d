#pragma once

// The TLS credentials of a worker: the certificate and the key by which it proves its name, and the authorities by
// which it verifies its peers. They are PEM files, which are read again when they change. Needs OpenSSL at run time.

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/sync/mutex.h"
#include "base/timer.h"
#include "transport/native/auth/libssl.h"
#include "transport/peer_identity.h"
#include "transport/tls_files.h"

namespace torchrpc::native {

/// The names of the holder in a certificate.
struct TlsNames {
  std::vector<std::string> names;  ///< the DNS names and the URIs of its "subject alternative name"
  std::vector<std::string> units;  ///< the organizational units (OU) of its subject

  static TlsNames of(const Libssl& library, const Libssl::X509& certificate);
};

class TlsCredentials {
 public:
  static constexpr Duration kReloadInterval = std::chrono::seconds(1);

  /// Reads the files, and checks every `reload_interval` whether they have changed. New connections use the new files,
  /// open connections keep the old ones. Changed files that cannot be used are logged and not used. Throws
  /// Error(kInvalidArgument) if the machine has no OpenSSL, or if a file cannot be used.
  explicit TlsCredentials(TlsFiles options, Duration reload_interval = kReloadInterval);
  ~TlsCredentials();
  TlsCredentials(const TlsCredentials&) = delete;
  TlsCredentials& operator=(const TlsCredentials&) = delete;

  using Context = std::shared_ptr<Libssl::SSL_CTX>;
  /// Returns the settings of a new connection. Thread-safe; does not block.
  Context context() const;
  const Libssl& library() const { return library_; }

  /// Returns the identity of the worker of that name, with the roles in its certificate. Throws Error(kProtocol) if the
  /// certificate is not for this name, or has an organizational unit that is not a role. Thread-safe.
  PeerIdentity identify(const std::string& name, const TlsNames& certificate) const;
  /// Returns the identity of this worker. Throws Error(kInvalidArgument) if its certificate is not for this
  /// name, or has an organizational unit that is not a role.
  PeerIdentity identifySelf(const std::string& name) const;

 private:
  /// Returns a text that changes when one of the files does.
  std::string fingerprint() const;
  Context load() const;
  void reload();

  const TlsFiles options_;
  const Libssl& library_;
  const Duration reload_interval_;

  mutable Mutex mutex_;
  CondVar wake_;
  Context context_ TORCHRPC_GUARDED_BY(mutex_);
  bool stopping_ TORCHRPC_GUARDED_BY(mutex_) = false;

  // On thread_ (and in the constructor before it starts).
  std::string fingerprint_;

  // Used by the constructor and the destructor only.
  std::thread thread_;
};

}  // namespace torchrpc::native
