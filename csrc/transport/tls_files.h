#pragma once

// What a worker needs for TLS, as the user gives it.

#include <string>

namespace torchrpc {

struct TlsFiles {
  std::string certificate;  ///< path of the PEM file with this worker's certificate, and those between it and the next
  std::string authorities;  ///< path of the PEM file with the certificates that sign workers', and revocation lists
  std::string key;          ///< path of the PEM file with the private key of the certificate
  /// How certificates name a worker: DNS names or SPIFFE IDs, with {name} for the worker's name or {base} for its name
  /// without the number at the end; several, separated by spaces. Empty: "{name}".
  std::string names;

  bool isGiven() const { return !certificate.empty(); }
};

}  // namespace torchrpc
