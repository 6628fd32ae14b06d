#include "agent/group_secret.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/random.h"

namespace torchrpc {

namespace {

constexpr auto kSecretKey = "secret";
constexpr auto kGiven = "given";  // the value of the key when the secret has been given by the user
constexpr size_t kSecretBytes = 32;
constexpr size_t kMinBytes = 16, kMaxBytes = 4096;

[[noreturn]] void reject(const std::string& text) { throw Error(ErrorCode::kInvalidArgument, text); }

std::string readSecretFile(const std::string& path) {
  const auto where = "TORCHRPC_SECRET_FILE names " + path;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) reject(where + ", which cannot be read: " + std::strerror(errno));
  struct stat status{};
  std::string text(kMaxBytes + 1, '\0');
  const bool regular = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  const auto got = regular ? ::read(fd, text.data(), text.size()) : 0;
  ::close(fd);
  if (!regular || got < 0) reject(where + ", which cannot be read: it is no plain file");
  if (status.st_mode & (S_IRWXG | S_IRWXO)) {
    reject(where + ", which others than its owner may read or write: run chmod 600 " + path);
  }
  text.resize(static_cast<size_t>(got));
  while (text.ends_with('\n') || text.ends_with('\r')) text.pop_back();
  return text;
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

}  // namespace

std::string givenSecret(const std::string& option) {
  if (!option.empty()) return validatedSecret(option, "the option secret");
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  if (const auto path = variable("TORCHRPC_SECRET_FILE"); !path.empty()) {
    return validatedSecret(readSecretFile(path), "TORCHRPC_SECRET_FILE names a file that");
  }
  const auto secret = variable("TORCHRPC_SECRET");
  return secret.empty() ? secret : validatedSecret(secret, "TORCHRPC_SECRET");
}

std::string groupSecret(c10d::Store& store, const std::string& given, const std::string& self) {
  const auto mine = given.empty() ? toHex(secureRandomBytes(kSecretBytes)) : kGiven;
  const auto stored = store.compareSet(kSecretKey, {}, std::vector<uint8_t>(mine.begin(), mine.end()));
  const std::string secret(stored.begin(), stored.end());
  if ((secret == kGiven) == !given.empty()) return given.empty() ? secret : given;
  throw Error(
      ErrorCode::kRendezvous,
      given.empty() ? self +
              " was given no secret, but others of its group were: give it the same "
              "TORCHRPC_SECRET_FILE, TORCHRPC_SECRET or option secret"
                    : self + " was given a secret, but others of its group were not: give all the same, or none");
}

}  // namespace torchrpc
