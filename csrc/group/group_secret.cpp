#include "group/group_secret.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <optional>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/hmac.h"
#include "base/random.h"
#include "transport/native/auth/identity.h"

namespace torchrpc {

namespace {

constexpr auto kFileVariable = "TORCHRPC_SECRET_FILE", kVariable = "TORCHRPC_SECRET",
               kIdentityVariable = "TORCHRPC_IDENTITY_FILE";
constexpr auto kGiven = "given";  // the value of kSecretKey if the user has given the secret
constexpr size_t kSecretBytes = 32;
constexpr size_t kMinBytes = 16, kMaxBytes = 4096;

[[noreturn]] void reject(const std::string& text) { throw Error(ErrorCode::kInvalidArgument, text); }

/// Returns why others than this user and root may know or change the contents, as the end of a sentence; empty if they
/// cannot.
std::string whyNotPrivate(const File& file, const std::string& path) {
  const auto status = file.regularStatus();
  if (!status) return ", which cannot be read: it is no plain file";
  if (status->st_uid != ::geteuid() && status->st_uid != 0) {
    return ", which belongs to another user (" + std::to_string(status->st_uid) +
        "): it must belong to the user that " + "runs this process (" + std::to_string(::geteuid()) + "), or to root";
  }
  if (status->st_mode & (S_IRWXG | S_IRWXO)) {
    return ", which others than its owner may read or write: run chmod 600 " + path;
  }
  return "";
}

// Follows links, because Kubernetes and systemd provide secrets in files that are reached by links. The checks apply to
// the file itself.
std::string readPrivateFile(const std::string& path, const std::string& source) {
  const auto where = source + " names " + path;
  const File file(path, O_RDONLY);
  if (file.error()) reject(where + ", which cannot be read: " + std::strerror(file.error()));
  if (const auto why = whyNotPrivate(file, path); !why.empty()) reject(where + why);
  auto text = file.read(kMaxBytes + 1);
  if (!text) reject(where + ", which cannot be read: " + std::strerror(errno));
  while (text->ends_with('\n') || text->ends_with('\r')) text->pop_back();
  return *text;
}

std::string validatedSecret(const std::string& secret, const std::string& source) {
  if (secret.size() >= kMinBytes && secret.size() <= kMaxBytes) return secret;
  reject(
      source + " has " + std::to_string(secret.size()) + " bytes: a secret has from " + std::to_string(kMinBytes) +
      " to " + std::to_string(kMaxBytes) +
      " random ones, for example from `python -c \"import secrets; print(secrets.token_hex(32))\"`");
}

std::string toHex(const std::string& bytes) {
  std::string out;
  for (const unsigned char byte : bytes) {
    for (const int digit : {byte >> 4, byte & 15}) out += "0123456789abcdef"[digit];
  }
  return out;
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

}  // namespace

std::string givenSecret(const std::string& option) {
  if (!option.empty()) return validatedSecret(option, "the option secret");
  if (const auto path = variable(kFileVariable); !path.empty()) {
    return validatedSecret(readPrivateFile(path, kFileVariable), "TORCHRPC_SECRET_FILE names a file that");
  }
  const auto secret = variable(kVariable);
  return secret.empty() ? secret : validatedSecret(secret, "TORCHRPC_SECRET");
}

std::shared_ptr<const native::Identity> givenIdentity(const std::string& option) {
  const auto path = option.empty() ? variable(kIdentityVariable) : option;
  if (path.empty()) return nullptr;
  const std::string source = option.empty() ? kIdentityVariable : "the option identity";
  return std::make_shared<const native::Identity>(readPrivateFile(path, source), path);
}

TlsFiles givenTls(TlsFiles options) {
  const auto complete = [](std::string& option, const char* name) {
    if (option.empty()) option = variable(name);
  };
  complete(options.certificate, "TORCHRPC_TLS_CERTIFICATE");
  complete(options.key, "TORCHRPC_TLS_KEY");
  complete(options.authorities, "TORCHRPC_TLS_CA");
  complete(options.names, "TORCHRPC_TLS_NAMES");
  const auto require = [&options](
                           const std::string& option, const std::string& name, const std::string& variable_name) {
    if (!option.empty() || (options.certificate + options.key + options.authorities).empty()) return;
    reject(
        "TLS needs a certificate, its key, and the certificates of the authorities (ca): give " + variable_name +
        ", or " + name + " in the option tls, too");
  };
  require(options.certificate, "certificate", "TORCHRPC_TLS_CERTIFICATE");
  require(options.key, "key", "TORCHRPC_TLS_KEY");
  require(options.authorities, "ca", "TORCHRPC_TLS_CA");
  return options;
}

bool hasGivenSecret(const std::string& secret, const std::string& identity) {
  return !secret.empty() || !identity.empty() || !variable(kFileVariable).empty() || !variable(kVariable).empty() ||
      !variable(kIdentityVariable).empty();
}

// Note [Where the secret comes from]
//
// 1. A secret that the user has given: the option, TORCHRPC_SECRET_FILE, TORCHRPC_SECRET. All workers need the same.
// 2. Without one, if the worker was told to listen on loopback (mustListenOnLoopback: for example, MASTER_ADDR is
//    "localhost"), all workers of its group are on this machine, and the user's id decides: the secret is made from a
//    key that is in a file of this user. It does not matter how the workers were started: by torchrun,
//    torch.multiprocessing or from several terminals. Another user who can read the store finds a salt there, but no
//    secret. A worker on loopback accepts no secret from the store either, since anybody could have written it.
// 3. Otherwise the first worker makes a secret, and the store returns it to every client. For workers on several
//    machines there is nothing better by default; the log says so at the start.
//
// The value of the key "secret" in the store is "given" in the first case, "user <salt> <check>" in the second, and the
// secret itself in the third. A worker verifies by the check that it has made the right secret.
//
// The key is in /dev/shm, which does not survive a reboot, or in /tmp if there is no such folder. (A variable such as
// TMPDIR or XDG_RUNTIME_DIR may differ between the workers of a group.) All users can write to these folders. If
// another user has made a file of that name first, the key is in /run/user/ID instead, to which only this user can
// write; that folder is not the first choice, because it disappears when the user logs out. Files that others can read
// are refused.

namespace {

constexpr std::string_view kUser = "user ";
constexpr size_t kSaltDigits = 2 * kSecretBytes, kCheckDigits = 2 * kHmacBytes;

struct KeyFolders {
  std::string shared;  ///< to which all users can write
  std::string own;
};

KeyFolders& keyFolders() {
  static KeyFolders folders{
      ::access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : "/tmp", "/run/user/" + std::to_string(::geteuid())};
  return folders;
}

std::string userKeyPath() {
  const auto& [shared, own] = keyFolders();
  const auto name = "/torchrpc-" + std::to_string(::geteuid()) + ".key";
  struct stat status{};
  const auto is_own_private = ::lstat(own.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
      status.st_uid == ::geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
  if (!is_own_private) return shared + name;
  const auto is_taken = ::lstat((shared + name).c_str(), &status) == 0 && status.st_uid != ::geteuid();
  return (is_taken || ::access((own + name).c_str(), F_OK) == 0 ? own : shared) + name;
}

[[noreturn]] void rejectUserKey(const std::string& self, const std::string& why) {
  throw Error(
      ErrorCode::kRendezvous,
      self +
          " meets its group at a loopback address, where workers authenticate by a file that only their user may "
          "read. " +
          why +
          ". Or give all workers the same TORCHRPC_SECRET_FILE, TORCHRPC_SECRET or option secret, "
          "which they use instead");
}

/// Returns the key of this user on this machine. With `may_create`, creates it atomically if there is none, so that all
/// processes read the same key.
std::string userKey(const std::string& self, bool may_create) {
  const auto path = userKeyPath();
  // All users may write to the folder, so a link in it could belong to another user.
  const auto open = [&path] { return std::make_unique<File>(path, O_RDONLY | O_NOFOLLOW); };
  auto file = open();
  if (file->error() == ENOENT && may_create) {
    const auto fresh = path + "." + toHex(secureRandomBytes(8));
    const File made(fresh, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, S_IRUSR | S_IWUSR);
    const int error = made.error() ? made.error() : !made.write(secureRandomBytes(kSecretBytes)) ? ENOSPC : 0;
    if (error == 0) ::link(fresh.c_str(), path.c_str());  // fails if another process was faster
    if (!made.error()) ::unlink(fresh.c_str());
    if (error != 0) rejectUserKey(self, "It cannot make " + path + ": " + std::strerror(error));
    file = open();
  }
  if (file->error()) rejectUserKey(self, "It cannot read " + path + ": " + std::strerror(file->error()));
  if (const auto why = whyNotPrivate(*file, path); !why.empty()) rejectUserKey(self, "It found " + path + why);
  auto key = file->read(kSecretBytes);
  if (!key || key->size() != kSecretBytes) rejectUserKey(self, "It found " + path + ", which is damaged: delete it");
  return *key;
}

std::string userSecret(const std::string& key, std::string_view salt) {
  return toHex(hmacSha256(key, {"torchrpc group", salt}));
}

std::string checkOf(const std::string& secret) { return toHex(hmacSha256(secret, {"torchrpc check"})); }

/// Makes the secret from the stored value, and verifies it. Throws Error(kRendezvous).
GroupSecret openUserSecret(std::string_view stored, const std::string& self) {
  if (stored.size() != kUser.size() + kSaltDigits + 1 + kCheckDigits) {
    throw Error(ErrorCode::kRendezvous, "the store's entry for the secret of the group of " + self + " is damaged");
  }
  const auto secret = userSecret(userKey(self, /*may_create=*/false), stored.substr(kUser.size(), kSaltDigits));
  if (isEqualInConstantTime(stored.substr(stored.size() - kCheckDigits), checkOf(secret))) {
    return {secret, GroupSecret::Source::kUser, std::string(stored)};
  }
  rejectUserKey(
      self,
      "Its own differs from that of the worker that started the group, which runs as another user, in another "
      "container or on another machine");
}

}  // namespace

GroupSecret groupSecret(c10d::Store& store, const std::string& given, bool are_local, const std::string& self) {
  using Source = GroupSecret::Source;
  auto mine = std::string(kGiven);
  if (given.empty()) {
    mine = toHex(secureRandomBytes(kSecretBytes));
    if (are_local) {
      const auto secret = userSecret(userKey(self, /*may_create=*/true), mine);
      mine = std::string(kUser) + mine + " " + checkOf(secret);
    }
  }
  const auto bytes = store.compareSet(kSecretKey, {}, std::vector<uint8_t>(mine.begin(), mine.end()));
  const std::string stored(bytes.begin(), bytes.end());
  if ((stored == kGiven) == given.empty()) {
    throw Error(
        ErrorCode::kRendezvous,
        given.empty() ? self +
                " was given no secret, but others of its group were: give it the same "
                "TORCHRPC_SECRET_FILE, TORCHRPC_SECRET or option secret"
                      : self + " was given a secret, but others of its group were not: give all the same, or none");
  }
  if (!given.empty()) return {given, Source::kGiven, stored};
  if (stored.starts_with(kUser)) return openUserSecret(stored, self);
  if (!are_local) return {stored, Source::kStore, stored};
  rejectUserKey(
      self,
      "Another worker has put a secret into the store that everybody can read there, because it meets the group "
      "at another address: give all workers the same MASTER_ADDR (in Python also init_method) and "
      "TORCHRPC_SOCKET_IFNAME");
}

void setUserKeyFolder(const std::string& folder) { keyFolders() = {folder, folder + "/own"}; }

void prepareStoreFile(const std::string& path, bool has_given_secret) {
  const File file(path, O_RDWR | O_CREAT, S_IRUSR | S_IWUSR);
  if (file.error()) reject(path + " cannot be opened: " + std::strerror(file.error()));
  if (has_given_secret) return;
  if (const auto why = whyNotPrivate(file, path); !why.empty()) {
    reject(
        "cannot meet at " + path + why +
        ". The group's secret is in that file, because the workers were given none: a file that does not " +
        "exist is made so that only its owner may read it. Or give all workers the same TORCHRPC_SECRET_FILE or " +
        "TORCHRPC_SECRET");
  }
}

}  // namespace torchrpc
