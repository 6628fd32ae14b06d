#pragma once

// The user's TLS options of a worker.

#include <string>

namespace torchrpc {

struct TlsFiles {
  std::string certificate;  ///< path of the PEM file with this worker's certificate and its intermediate certificates
  std::string authorities;  ///< path of the PEM file with the authorities' certificates, and revocation lists
  std::string key;          ///< path of the PEM file with the private key of the certificate
  /// The names that a worker's certificate may have: DNS names or SPIFFE IDs, separated by spaces, with {name} for the
  /// worker's name or {base} for its name without the number at the end. Empty: "{name}".
  std::string names;

  bool isGiven() const { return !certificate.empty(); }
};

}  // namespace torchrpc
