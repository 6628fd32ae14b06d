#pragma once

// What a worker proves its name with over TLS, and what it checks peers' proofs with: PEM files, which are read again
// when they change. Needs OpenSSL at run time.

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

/// What a certificate says of its holder.
struct TlsNames {
  std::vector<std::string> names;  ///< the DNS names and the URIs of its "subject alternative name"
  std::vector<std::string> units;  ///< the organizational units (OU) of its subject

  static TlsNames of(const Libssl& library, const Libssl::X509& certificate);
};

class TlsCredentials {
 public:
  static constexpr Duration kReloadInterval = std::chrono::seconds(1);

  /// Reads the files, and looks every `reload_interval` whether they have changed. Connections that are open keep what
  /// they began with; what cannot be read is logged, and not used. Throws Error(kInvalidArgument) if the machine has no
  /// OpenSSL, or if a file cannot be used.
  explicit TlsCredentials(TlsFiles options, Duration reload_interval = kReloadInterval);
  ~TlsCredentials();
  TlsCredentials(const TlsCredentials&) = delete;
  TlsCredentials& operator=(const TlsCredentials&) = delete;

  using Context = std::shared_ptr<Libssl::SSL_CTX>;
  /// For a new connection. Thread-safe; does not block.
  Context context() const;
  const Libssl& library() const { return library_; }

  /// Who the worker of that name is, by its certificate. Throws Error(kProtocol) if that is not for this name.
  /// Thread-safe.
  PeerIdentity identify(const std::string& name, const TlsNames& certificate) const;
  /// Who this worker is. Throws Error(kInvalidArgument) if its certificate is not for this name.
  PeerIdentity identifySelf(const std::string& name) const;

 private:
  /// Of the files: changes when one of them does.
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

  // On the thread.
  std::string fingerprint_;

  // Used by the constructor and the destructor only.
  std::thread thread_;
};

}  // namespace torchrpc::native
