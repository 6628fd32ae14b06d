// The secret of a group: given by the user, made from the user's key on this machine, or created by the first worker
// and read from the store by the others. The attacker can write to the store, but has no secret.

#include "group/group_secret.h"

#include <catch2/catch.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include "base/error.h"
#include "base/random.h"

using namespace torchrpc;
using Catch::Contains;
using Source = GroupSecret::Source;

namespace {

const std::string kGiven = "0123456789abcdef";

std::string textOf(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<uint8_t> bytesOf(const std::string& text) { return {text.begin(), text.end()}; }

/// A folder that is removed at the end of the test, in which the user's key is.
struct Folder {
  Folder() {
    std::filesystem::create_directory(path);
    setUserKeyFolder(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string file(const std::string& name, const std::string& contents, mode_t mode = 0600) const {
    const auto file = path + "/" + name;
    std::ofstream(file) << contents;
    ::chmod(file.c_str(), mode);
    return file;
  }
  std::string key() const { return path + "/torchrpc-" + std::to_string(::geteuid()) + ".key"; }

  const std::string path = std::filesystem::temp_directory_path() / ("torchrpc_test_" + std::to_string(randomNumber()));
};

struct Variable {
  Variable(const char* name, const std::string& value) : name(name) { ::setenv(name, value.c_str(), 1); }
  ~Variable() { ::unsetenv(name); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  const char* const name;
};

}  // namespace

TEST_CASE("workers of several machines without a given secret share a random one") {
  c10d::HashStore store, other;
  const auto secret = groupSecret(store, "", false, "alice");
  CHECK(secret.source == Source::kStore);
  CHECK(secret.bytes.size() == 64);
  CHECK(groupSecret(store, "", false, "bob").bytes == secret.bytes);
  CHECK(groupSecret(other, "", false, "carol").bytes != secret.bytes);
}

TEST_CASE("a given secret is not written to the store") {
  c10d::HashStore store;
  CHECK(groupSecret(store, kGiven, true, "alice").bytes == kGiven);
  const auto other = groupSecret(store, kGiven + "2", true, "bob");
  CHECK(other.bytes == kGiven + "2");
  CHECK(other.source == Source::kGiven);
  CHECK(textOf(store.get("secret")).find(kGiven) == std::string::npos);
}

TEST_CASE("a group of which only some were given a secret does not form") {
  const Folder folder;
  c10d::HashStore store, other, local;
  groupSecret(store, kGiven, false, "alice");
  CHECK_THROWS_WITH(groupSecret(store, "", false, "bob"), Contains("bob was given no secret"));
  groupSecret(other, "", false, "alice");
  CHECK_THROWS_WITH(groupSecret(other, kGiven, false, "bob"), Contains("bob was given a secret"));
  groupSecret(local, "", true, "alice");
  CHECK_THROWS_WITH(groupSecret(local, kGiven, true, "bob"), Contains("bob was given a secret"));
}

TEST_CASE("local workers of one user share a secret that the store does not have") {
  const Folder folder;
  c10d::HashStore store, other;
  const auto secret = groupSecret(store, "", true, "alice");
  CHECK(secret.source == Source::kUser);
  CHECK(groupSecret(store, "", true, "bob").bytes == secret.bytes);
  CHECK(groupSecret(store, "", false, "carol").bytes == secret.bytes);  // was told another address of this machine
  CHECK(groupSecret(other, "", true, "dave").bytes != secret.bytes);
  CHECK(textOf(store.get("secret")).find(secret.bytes) == std::string::npos);
  struct stat status{};
  REQUIRE(::stat(folder.key().c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0600);
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path), {}) == 1);
}

TEST_CASE("who reads the store, but not the user's key, does not learn the secret of local workers") {
  c10d::HashStore store;
  const Folder users;
  groupSecret(store, "", true, "alice");
  const Folder strangers;
  std::ofstream(strangers.key()) << std::string(32, 'x');
  ::chmod(strangers.key().c_str(), 0600);
  CHECK_THROWS_WITH(
      groupSecret(store, "", true, "mallory"),
      Contains("differs from that of the worker that started the group") && Contains("TORCHRPC_SECRET_FILE"));
  std::filesystem::remove(strangers.key());
  CHECK_THROWS_WITH(groupSecret(store, "", false, "mallory"), Contains("cannot read"));
}

TEST_CASE("local workers take no secret from the store, where anybody can put one") {
  const Folder folder;
  c10d::HashStore store, damaged;
  store.set("secret", bytesOf(std::string(64, 'a')));
  CHECK_THROWS_WITH(groupSecret(store, "", true, "alice"), Contains("everybody can read") && Contains("MASTER_ADDR"));
  damaged.set("secret", bytesOf("user 12"));
  CHECK_THROWS_WITH(groupSecret(damaged, "", true, "alice"), Contains("is damaged"));
}

TEST_CASE("a key that others can read, or that is no file, is refused") {
  const Folder folder;
  c10d::HashStore store;
  folder.file(std::filesystem::path(folder.key()).filename(), std::string(32, 'k'), 0644);
  CHECK_THROWS_WITH(groupSecret(store, "", true, "alice"), Contains("chmod 600 " + folder.key()));
  std::filesystem::remove(folder.key());
  std::filesystem::create_symlink(folder.file("other", std::string(32, 'k')), folder.key());
  CHECK_THROWS_WITH(groupSecret(store, "", true, "alice"), Contains("cannot read"));
  std::filesystem::remove(folder.key());
  folder.file(std::filesystem::path(folder.key()).filename(), "short");
  CHECK_THROWS_WITH(groupSecret(store, "", true, "alice"), Contains("damaged: delete it"));
}

TEST_CASE("if another user has taken the name of the key, it is in a folder of this user") {
  const Folder folder;
  const auto taken = folder.file(std::filesystem::path(folder.key()).filename(), std::string(32, 'k'));
  if (::chown(taken.c_str(), 65534, static_cast<gid_t>(-1)) != 0) return;  // only root can make such a file
  c10d::HashStore store;
  CHECK_THROWS_WITH(groupSecret(store, "", true, "alice"), Contains("belongs to another user (65534)"));
  const auto own = folder.path + "/own";
  std::filesystem::create_directory(own);
  ::chmod(own.c_str(), 0777);
  CHECK_THROWS_WITH(groupSecret(store, "", true, "alice"), Contains("belongs to another user (65534)"));
  ::chmod(own.c_str(), 0700);
  const auto secret = groupSecret(store, "", true, "alice").bytes;
  std::filesystem::remove(taken);  // in a folder such as /dev/shm, only the other user can
  CHECK(groupSecret(store, "", true, "bob").bytes == secret);
}

TEST_CASE("processes that make the user's key at the same time agree") {
  for (int round = 0; round < 20; ++round) {
    const Folder folder;
    c10d::HashStore store;
    std::vector<std::string> secrets(4);
    std::vector<std::thread> threads;
    for (auto& secret : secrets) {
      threads.emplace_back([&] { secret = groupSecret(store, "", true, "worker").bytes; });
    }
    for (auto& thread : threads) thread.join();
    for (const auto& secret : secrets) CHECK(secret == secrets.front());
  }
}

TEST_CASE("a secret that is too short or too long is refused") {
  CHECK(givenSecret(kGiven) == kGiven);
  CHECK_THROWS_WITH(givenSecret("short"), Contains("the option secret has 5 bytes"));
  CHECK_THROWS_WITH(givenSecret(std::string(5000, 'x')), Contains("5000 bytes"));
}

TEST_CASE("a secret file is read to its end, through links, and a FIFO does not block") {
  const Folder folder;
  const auto file = folder.file("secret", kGiven + "\r\n");
  {
    const Variable variable("TORCHRPC_SECRET_FILE", file);
    CHECK(givenSecret("") == kGiven);
    CHECK(hasGivenSecret("", ""));
  }
  CHECK_FALSE(hasGivenSecret("", ""));
  CHECK(hasGivenSecret("", "a.identity"));
  std::filesystem::create_symlink(file, folder.path + "/link");
  {
    const Variable variable("TORCHRPC_SECRET_FILE", folder.path + "/link");
    CHECK(givenSecret("") == kGiven);
  }
  const auto fifo = folder.path + "/fifo";
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  const Variable variable("TORCHRPC_SECRET_FILE", fifo);
  CHECK_THROWS_WITH(givenSecret(""), Contains("no plain file"));
}

TEST_CASE("a secret file of another user is refused") {
  const Folder folder;
  const auto file = folder.file("secret", kGiven);
  if (::chown(file.c_str(), 65534, static_cast<gid_t>(-1)) != 0) return;  // only root can make one
  const Variable variable("TORCHRPC_SECRET_FILE", file);
  CHECK_THROWS_WITH(givenSecret(""), Contains("belongs to another user (65534)"));
  CHECK_THROWS_WITH(prepareStoreFile(file, false), Contains("belongs to another user (65534)"));
}

TEST_CASE("the file of a store that has the secret must be private") {
  const Folder folder;
  const auto fresh = folder.path + "/store";
  prepareStoreFile(fresh, false);
  struct stat status{};
  REQUIRE(::stat(fresh.c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0600);
  const auto open = folder.file("open", "", 0644);
  CHECK_THROWS_WITH(prepareStoreFile(open, false), Contains("chmod 600 " + open) && Contains("TORCHRPC_SECRET"));
  CHECK_NOTHROW(prepareStoreFile(open, true));
  CHECK_THROWS_WITH(prepareStoreFile(folder.path + "/no/store", true), Contains("cannot be opened"));
}
