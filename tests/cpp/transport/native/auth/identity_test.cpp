// Certificates and the proofs made with them.

#include "transport/native/auth/identity.h"

#include <catch2/catch.hpp>

#include <functional>
#include <utility>

#include "base/error.h"
#include "outcomes.h"

using namespace torchrpc;
using namespace torchrpc::native;

namespace {

using Catch::Contains;
using std::chrono::sys_seconds;

constexpr auto kDay = std::chrono::hours(24);
const std::string kHash(32, 'h');

sys_seconds in(std::chrono::seconds duration) {
  return std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now()) + duration;
}

std::string identityText(const std::string& group_key, const std::string& name) {
  return makeIdentity(group_key, {.name = name, .roles = {PeerIdentity::kMemberRole, "trainer"}}, kDay);
}

std::string refusalText(const std::function<void()>& run) { return test::errorOf(run).text(); }

struct Group {
  const std::string key = makeGroupKey();
  const Identity alice{identityText(key, "alice"), "alice.identity"};
  const Identity bob{identityText(key, "bob"), "bob.identity"};

  std::string checkedByBob(std::string_view proof, const std::string& name = "alice") const {
    return refusalText([&] { bob.check(proof, Side::kOpener, kHash, name); });
  }
};

}  // namespace

TEST_CASE("A proof shows the name and the roles of its maker", "[identity]") {
  const Group group;
  const auto peer = group.bob.check(group.alice.prove(Side::kOpener, kHash), Side::kOpener, kHash, "alice");
  CHECK(peer.name == "alice");
  CHECK(peer.roles == std::vector<std::string>{"member", "trainer"});
  CHECK(peer.isMember());
  CHECK(group.alice.secret() == group.bob.secret());
  CHECK(group.alice.secret().size() == 32);
}

TEST_CASE("A proof is valid for one handshake, one side and one name", "[identity]") {
  const Group group;
  const auto proof = group.alice.prove(Side::kOpener, kHash);
  CHECK_THAT(
      refusalText([&] { group.bob.check(proof, Side::kOpener, std::string(32, 'x'), "alice"); }),
      Contains("does not have the private key"));
  CHECK_THAT(
      refusalText([&] { group.bob.check(proof, Side::kListener, kHash, "alice"); }),
      Contains("does not have the private key"));
  CHECK_THAT(group.checkedByBob(proof, "bob"), Contains("its certificate is that of worker alice"));
}

TEST_CASE("No bit of a proof can be changed", "[identity]") {
  const Group group;
  const auto proof = group.alice.prove(Side::kOpener, kHash);
  REQUIRE(group.checkedByBob(proof) == "no error");
  for (size_t byte = 0; byte < proof.size(); ++byte) {
    auto changed = proof;
    changed[byte] = static_cast<char>(changed[byte] ^ 1);
    CHECK_THAT(group.checkedByBob(changed), Contains("it is not proved to be worker alice"));
  }
  for (size_t bytes = 0; bytes < proof.size(); bytes += 7) {
    CHECK_THAT(group.checkedByBob(proof.substr(0, bytes)), Contains("it is not proved to be worker alice"));
  }
}

TEST_CASE("A certificate of another group is refused", "[identity]") {
  const Group group, other;
  CHECK_THAT(
      group.checkedByBob(other.alice.prove(Side::kOpener, kHash)),
      Contains("has not been made with the key of this group"));
}

TEST_CASE("A certificate is not valid after its time", "[identity]") {
  const Group group;
  const Identity later(
      identityText(group.key, "carol"), "carol.identity", [now = in(std::chrono::seconds(0))]() mutable {
        return std::exchange(now, in(kDay * 2));  // its own certificate is read today
      });
  CHECK_THAT(
      refusalText([&] { later.check(group.alice.prove(Side::kOpener, kHash), Side::kOpener, kHash, "alice"); }),
      Contains("its certificate has expired on"));
  CHECK_THAT(
      refusalText([&] { Identity(identityText(group.key, "carol"), "carol.identity", [] { return in(kDay * 2); }); }),
      Contains("the certificate in carol.identity has expired on"));
  CHECK_THAT(
      refusalText([&] { Identity(identityText(group.key, "carol"), "carol.identity", [] { return in(-kDay); }); }),
      Contains("is valid only from"));
}

TEST_CASE("A damaged identity file says which part is wrong", "[identity]") {
  const Group group;
  const auto text = identityText(group.key, "carol");
  const auto read = [](const std::string& changed) {
    return refusalText([&] { Identity(changed, "carol.identity"); });
  };
  CHECK_THAT(read(""), Contains("carol.identity has no 'secret'"));
  CHECK_THAT(read("nonsense"), Contains("not of the form 'name: base64'"));
  CHECK_THAT(read("secret: ???"), Contains("'secret' in carol.identity is no base64 text"));
  CHECK_THAT(read("secret: AAAA"), Contains("3 bytes instead of 32"));
  const auto swapped = [&](const std::string& part) {
    const auto other = identityText(group.key, "dave");
    const auto at = text.find(part + ": "), from = other.find(part + ": ");
    return text.substr(0, at) + other.substr(from, other.find('\n', from) - from) + text.substr(text.find('\n', at));
  };
  CHECK_THAT(read(swapped("private key")), Contains("is not that of its certificate"));
  CHECK_THAT(read(swapped("certificate")), Contains("is not that of its certificate"));
}

TEST_CASE("An identity is made only for a valid name, role and time", "[identity]") {
  const auto key = makeGroupKey();
  const auto make = [&key](const PeerIdentity& holder, std::chrono::seconds validity) {
    return refusalText([&] { makeIdentity(key, holder, validity); });
  };
  CHECK(make({.name = "worker:0.a-b_c", .roles = {}}, kDay) == "no error");
  CHECK_THAT(make({.name = "", .roles = {}}, kDay), Contains("cannot have the name ''"));
  CHECK_THAT(make({.name = "a\nb", .roles = {}}, kDay), Contains("cannot have the name"));
  CHECK_THAT(make({.name = "a", .roles = {"b c"}}, kDay), Contains("cannot have the role 'b c'"));
  CHECK_THAT(make({.name = "a", .roles = {}}, std::chrono::seconds(0)), Contains("valid for some time"));
  CHECK_THAT(
      refusalText([&] { makeIdentity(identityText(key, "a"), {.name = "b", .roles = {}}, kDay); }),
      Contains("the group key has no 'signing key'"));
}
