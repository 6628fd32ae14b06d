// The secret of a group: given by the user, or created by the first worker and read from the store by the others.

#include "agent/group_secret.h"

#include <catch2/catch.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

using namespace torchrpc;

namespace {

const std::string kGiven = "0123456789abcdef";

std::string textOf(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

TEST_CASE("workers without a given secret share a random one") {
  c10d::HashStore store, other;
  const auto secret = groupSecret(store, "", "alice");
  CHECK(secret.size() == 64);
  CHECK(groupSecret(store, "", "bob") == secret);
  CHECK(groupSecret(other, "", "carol") != secret);
}

TEST_CASE("a given secret is not written to the store") {
  c10d::HashStore store;
  CHECK(groupSecret(store, kGiven, "alice") == kGiven);
  CHECK(groupSecret(store, kGiven + "2", "bob") == kGiven + "2");
  CHECK(textOf(store.get("secret")).find(kGiven) == std::string::npos);
}

TEST_CASE("a group of which only some were given a secret does not form") {
  c10d::HashStore store, other;
  groupSecret(store, kGiven, "alice");
  CHECK_THROWS_WITH(groupSecret(store, "", "bob"), Catch::Contains("bob was given no secret"));
  groupSecret(other, "", "alice");
  CHECK_THROWS_WITH(groupSecret(other, kGiven, "bob"), Catch::Contains("bob was given a secret"));
}

TEST_CASE("a secret that is too short or too long is refused") {
  CHECK(givenSecret(kGiven) == kGiven);
  CHECK_THROWS_WITH(givenSecret("short"), Catch::Contains("the option secret has 5 bytes"));
  CHECK_THROWS_WITH(givenSecret(std::string(5000, 'x')), Catch::Contains("5000 bytes"));
}
