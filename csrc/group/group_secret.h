#pragma once

// The secret that the workers of a group share, and where it comes from: see Note [Where the secret comes from] in
// group_secret.cpp. Used only by the thread that starts the node, because requests to the store block.

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
    kGiven,  ///< the user has given it to all workers
    kUser,   ///< made from a key in a file that only processes of this user on this machine can read
    kStore,  ///< made by the first worker; the store returns it to every client
  };
  std::string bytes;
  Source source;
  std::string stored{};  ///< the value of kSecretKey in the store
};

/// The key of the secret in the store.
constexpr auto kSecretKey = "secret";

/// The secret that the user has given: `option`, else the contents of the file that TORCHRPC_SECRET_FILE names (without
/// the line break at its end), else TORCHRPC_SECRET; empty if there is none. Throws Error(kInvalidArgument) if the
/// secret is too short or too long, or if the file cannot be read, may be read by others than its owner, or belongs to
/// a user other than this one and root.
std::string givenSecret(const std::string& option);

/// The identity in the file that `option`, else TORCHRPC_IDENTITY_FILE, names; null if there is none. Throws
/// Error(kInvalidArgument) for a file that is no identity, or as givenSecret() for one that is not private.
std::shared_ptr<const native::Identity> givenIdentity(const std::string& option);

/// The TLS options in `options` or, where one is empty there, in TORCHRPC_TLS_CERTIFICATE, TORCHRPC_TLS_KEY,
/// TORCHRPC_TLS_CA and TORCHRPC_TLS_NAMES. Throws Error(kInvalidArgument) if a certificate, a key or a CA is given, but
/// not all three.
TlsFiles givenTls(TlsFiles options);

/// Whether the user has given a secret, or an identity, which has a secret, by these options or in the environment.
/// They need not be valid.
bool hasGivenSecret(const std::string& secret, const std::string& identity);

/// Returns the secret of the group that meets at `store`. It is `given`, which is not written to the store. If that is
/// empty and all workers of the group are on this machine (`are_local`), it is a secret that only processes of this
/// user can make. Otherwise it is the secret in the store. Throws Error(kRendezvous) if the workers of the group have
/// no secret in common.
GroupSecret groupSecret(c10d::Store& store, const std::string& given, bool are_local, const std::string& self);

/// Creates the file of a file:// store if there is none. Throws Error(kInvalidArgument) if it cannot be opened. If the
/// group was given no secret, its secret is in that file. Then also throws if others than the owner may read or write
/// the file, or if it belongs to a user other than this one and root.
void prepareStoreFile(const std::string& path, bool has_given_secret);

/// For tests: the folder in which this process keeps the user's key.
void setUserKeyFolder(const std::string& folder);

}  // namespace torchrpc
