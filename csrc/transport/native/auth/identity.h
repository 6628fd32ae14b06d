#pragma once

// Who a worker is: a certificate, signed with the group's signing key, and the private key of its holder. Both sides of
// a handshake send a proof made of these, so that each knows the name and the roles of the other, which it otherwise
// takes on trust. Ed25519 signatures, from libsodium. Threads: any; constant after construction.
//
// A group key file has the signing key, and belongs where certificates are made, on no worker. An identity file has
// what one worker needs: the group's secret, the group's public key, its certificate and its private key. Both are
// text: comments, and one "name: base64" for each part.

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/native/auth/noise.h"
#include "transport/peer_identity.h"

namespace torchrpc::native {

/// Says that the holder of a key is a worker of the group.
struct Certificate {
  PeerIdentity holder;
  std::chrono::sys_seconds not_before, not_after;
  std::string public_key;
};

/// The text of a new group key file.
std::string makeGroupKey();

/// The text of a new identity file, made with the group key file's text. Throws Error(kInvalidArgument) for text that
/// is no group key, for an invalid name or role, and for a time of validity that is not positive.
std::string makeIdentity(std::string_view group_key, const PeerIdentity& holder, std::chrono::seconds validity);

class Identity {
 public:
  using Clock = std::function<std::chrono::sys_seconds()>;

  /// From the text of an identity file; `source` names it in errors. Throws Error(kInvalidArgument) if a part is
  /// missing or damaged, or if the certificate is not valid now.
  Identity(std::string_view text, const std::string& source, Clock clock = nullptr);
  ~Identity();
  Identity(const Identity&) = delete;
  Identity& operator=(const Identity&) = delete;

  const PeerIdentity& holder() const { return certificate_.holder; }
  /// The secret of the group.
  const std::string& secret() const { return secret_; }

  /// The proof of this side for its peer: the certificate, and a signature over `handshake_hash`, which must be of no
  /// other handshake.
  std::string prove(Side side, std::string_view handshake_hash) const;

  /// What the proof of a peer on that side, which claims `name`, shows. Throws Error(kProtocol): the proof is
  /// malformed, of another group, handshake or name, or its certificate is not valid now.
  PeerIdentity check(std::string_view proof, Side side, std::string_view handshake_hash, const std::string& name) const;

 private:
  const Clock clock_;
  std::string secret_, group_key_, certificate_bytes_, private_key_;
  Certificate certificate_;
};

}  // namespace torchrpc::native
