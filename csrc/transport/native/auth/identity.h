#pragma once

// The identity of a worker: a certificate, signed with the group's signing key, and the private key of its holder. Each
// side of a handshake sends a proof made with them, so that the other side can verify its name and its roles. Without
// identities or TLS certificates, a worker trusts the names that its peers send. Signatures are Ed25519, from
// libsodium. Threads: any; constant after construction.
//
// A group key file contains the signing key and the group's secret. It belongs where certificates are made, not on
// workers. An identity file contains what one worker needs: the group's secret, the group's public key, its
// certificate and its private key. Both are text files of comments and lines "name: base64", one for each part.

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/native/auth/noise.h"
#include "transport/peer_identity.h"

namespace torchrpc::native {

/// Certifies the name and the roles of the worker that has the private key of `public_key`.
struct Certificate {
  PeerIdentity holder;
  std::chrono::sys_seconds not_before, not_after;
  std::string public_key;
};

/// Makes a group key and returns the text of its file.
std::string makeGroupKey();

/// Makes an identity with the text of a group key file, and returns the text of its file. Throws
/// Error(kInvalidArgument) for text that is no group key, for an invalid name or role, for too many roles, and for a
/// validity that is not positive.
std::string makeIdentity(std::string_view group_key, const PeerIdentity& holder, std::chrono::seconds validity);

class Identity {
 public:
  using Clock = std::function<std::chrono::sys_seconds()>;

  /// Parses the text of an identity file; `source` names the file in errors. Throws Error(kInvalidArgument) if a part
  /// is missing or damaged, or if the certificate is not valid now.
  Identity(std::string_view text, const std::string& source, Clock clock = nullptr);
  ~Identity();
  Identity(const Identity&) = delete;
  Identity& operator=(const Identity&) = delete;

  const PeerIdentity& holder() const { return certificate_.holder; }
  /// The secret of the group.
  const std::string& secret() const { return secret_; }

  /// Returns the proof of this side for its peer: the certificate, and a signature over `handshake_hash`. No other
  /// handshake may have the same hash.
  std::string prove(Side side, std::string_view handshake_hash) const;

  /// Verifies the proof of a peer on that side, which claims to be `name`, and returns its identity. Throws
  /// Error(kProtocol) if the proof is malformed, if it is for another group, handshake or name, or if its certificate
  /// is not valid now.
  PeerIdentity check(std::string_view proof, Side side, std::string_view handshake_hash, const std::string& name) const;

 private:
  const Clock clock_;
  std::string secret_, group_key_, certificate_bytes_, private_key_;
  Certificate certificate_;
};

}  // namespace torchrpc::native
