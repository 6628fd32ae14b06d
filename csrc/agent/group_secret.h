#pragma once

// The secret that the workers of a group share, and where it comes from. Note [Where the secret comes from] in
// group_secret.cpp has the rule. Used by the thread that starts the node only; the store blocks.

#include <memory>
#include <string>

#include "transport/tls_files.h"

namespace c10d {
class Store;
}

namespace torchrpc {

namespace native {
class Identity;
}

struct GroupSecret {
  enum class Source {
    kGiven,  ///< you have given it to all workers
    kUser,   ///< made from a key in a file that only processes of this user on this machine can read
    kStore,  ///< the first worker has made it, and the store hands it to whoever asks
  };
  std::string bytes;
  Source source;
  std::string stored{};  ///< what the store has of it
};

/// Its key in the store.
constexpr auto kSecretKey = "secret";

/// The secret that the user has given: `option`, else the contents of the file that TORCHRPC_SECRET_FILE names (without
/// the line break at its end), else TORCHRPC_SECRET; empty if there is none. Throws Error(kInvalidArgument) for a
/// secret that is too short, or too long; for a file that others than its owner may read, that belongs to another user
/// than this one and root, or that cannot be read.
std::string givenSecret(const std::string& option);

/// The identity in the file that `option`, else TORCHRPC_IDENTITY_FILE, names; null if there is none. Throws
/// Error(kInvalidArgument) for a file that is no identity, or as givenSecret() for one that is not private.
std::shared_ptr<const native::Identity> givenIdentity(const std::string& option);

/// The TLS options in `options` or, where one is empty there, in TORCHRPC_TLS_CERTIFICATE, TORCHRPC_TLS_KEY,
/// TORCHRPC_TLS_CA and TORCHRPC_TLS_NAMES. Throws Error(kInvalidArgument) if a certificate, a key or a CA is given, but
/// not all three.
TlsFiles givenTls(TlsFiles options);

/// Whether the user has given a secret or an identity, which has one, by these options or in the environment; valid or
/// not.
bool hasGivenSecret(const std::string& secret, const std::string& identity);

/// The secret of the group that meets at `store`: `given`, which is not written to the store; else, if all workers of
/// the group `are_local`, that is on this machine, one that only processes of this user can make; else the one in the
/// store. Throws Error(kRendezvous) if the workers of the group have no secret in common.
GroupSecret groupSecret(c10d::Store& store, const std::string& given, bool are_local, const std::string& self);

/// Creates the file of a file:// store if there is none. Throws Error(kInvalidArgument) if it cannot be opened. Also,
/// if the group was given no secret, for a file that others than its owner may read or write, or that belongs to
/// another user than this one and root: the group's secret is in that file.
void prepareStoreFile(const std::string& path, bool has_given_secret);

/// For tests: the folder in which this process keeps the user's key.
void setUserKeyFolder(const std::string& folder);

}  // namespace torchrpc
