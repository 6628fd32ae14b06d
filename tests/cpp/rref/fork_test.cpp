// RRefs without failures: which messages are sent, and what each worker keeps alive.

#include "rref/sim_group.h"

using namespace torchrpc;
using namespace torchrpc::testing;

TEST_CASE("remote() returns a user immediately, which the reply confirms") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  CHECK_FALSE(user(rref)->confirmed());
  CHECK(group.info(0).pending_users == 1);
  CHECK(toString(rref->id()) == toString(RRefId{0, 0}));
  CHECK(toString(user(rref)->forkId()) == toString(ForkId{0, 1}));
  group.network.drain();
  CHECK(user(rref)->confirmed());
  CHECK(group.info(0).pending_users == 0);
  CHECK(group.info(1).owner_rrefs == 1);
  CHECK(group.info(1).forks == 1);
  CHECK(fetched(group, 0, rref).value() == 0);
  rref.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a local value is in no table until it is forked, and leaves it with its last fork") {
  SimGroup group(2);
  auto rref = group[0].rrefs().createOwner();
  rref->setValue(42);
  CHECK(group.info(0).owner_rrefs == 0);
  group[0].call(1, {rref});
  CHECK(group.info(0).owner_rrefs == 1);
  group.network.drain();
  REQUIRE(group.kept.size() == 1);
  CHECK(user(group.kept[0])->confirmed());
  CHECK(group.network.count(Kind::kRRefForkRequest) == 0);
  CHECK(fetched(group, 1, group.kept[0]).value() == 42);
  group.kept.clear();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a fork made by the owner is confirmed on arrival, without a message") {
  SimGroup group(2);
  auto rref = group[0].rrefs().createOwner();
  group[0].call(1, {rref});
  REQUIRE(group.network.deliverFirst(Kind::kCppCall));
  group.network.runTask(0);
  CHECK(group.network.packets().size() == 1);  // the reply
  REQUIRE(group.kept.size() == 1);
  CHECK(user(group.kept[0])->confirmed());
}

TEST_CASE("a user function waits until the owner knows its argument") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(2, {rref});
  REQUIRE(group.network.deliverFirst(Kind::kCppCall));
  CHECK(group.network.tasks() == 0);
  CHECK(group.info(2).pending_users == 1);
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest));
  CHECK(group.network.tasks() == 0);
  CHECK(group.info(1).forks == 2);
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest, true));
  CHECK(group.network.tasks() == 1);
}

TEST_CASE("a parent stays alive until the owner has registered its child") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(2, {rref});
  rref.reset();
  CHECK(group.info(0).pending_children == 1);
  REQUIRE(group.network.deliverFirst(Kind::kCppCall));
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest));
  CHECK(group.info(0).pending_children == 1);
  CHECK(group.network.count(Kind::kRRefUserDelete) == 0);
  CHECK(group.network.count(Kind::kRRefChildAccept) == 0);
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest, true));
  REQUIRE(group.network.deliverFirst(Kind::kRRefChildAccept));
  CHECK(group.info(0).pending_children == 0);
  CHECK(group.network.count(Kind::kRRefUserDelete) == 1);
  group.network.drain();
  CHECK(group.info(1).forks == 1);
  CHECK(fetched(group, 2, group.kept.at(0)).ok());
  group.kept.clear();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a fork that arrives at the owner becomes the owner's own RRef") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(1, {rref});
  rref.reset();
  group.network.drain();
  REQUIRE(group.kept.size() == 1);
  REQUIRE(owner(group.kept[0]));
  CHECK(owner(group.kept[0])->wait(kNoLimit).toInt() == 0);
  CHECK(group.clean());
}

TEST_CASE("a fork that arrives at the owner before the call that makes the value becomes the same RRef") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group[0].call(1, {rref});
  rref.reset();
  REQUIRE(group.network.deliverFirst(Kind::kCppCall));
  group.network.runTask(0);
  REQUIRE(owner(group.kept.at(0)));
  CHECK_FALSE(isReady(group.kept[0]));
  group.network.drain();
  CHECK(isReady(group.kept[0]));
  CHECK(group.clean());
}

TEST_CASE("a child may register before the call that makes the value arrives") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group[0].call(2, {rref});
  REQUIRE(group.network.deliverFirst(Kind::kCppCall));
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest));
  CHECK(group.info(1).owner_rrefs == 1);
  group.network.drain();
  CHECK(fetched(group, 2, group.kept.at(0)).value() == 0);
  rref.reset();
  group.kept.clear();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a fetch may arrive before the call that makes the value") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  std::optional<Result<int64_t>> got;
  group[0].fetch(user(rref), [&](Result<int64_t> value) { got = std::move(value); });
  REQUIRE(group.network.deliverFirst(Kind::kRRefFetch));
  CHECK_FALSE(got);
  group.network.drain();
  REQUIRE(got);
  CHECK(got->ok());
}

TEST_CASE("remote() to the same worker returns the owner's RRef, kept until the call is answered") {
  SimGroup group(1);
  auto rref = group[0].remote(0);
  REQUIRE(owner(rref));
  CHECK(group.info(0).owner_rrefs == 1);
  SECTION("held by the caller") {
    group.network.drain();
    CHECK(owner(rref)->wait(kNoLimit).toInt() == 0);
  }
  SECTION("not held") {
    std::weak_ptr<RRef> weak = rref;
    rref.reset();
    CHECK_FALSE(weak.expired());
    group.network.drain();
    CHECK(weak.expired());
  }
  CHECK(group.clean());
}

TEST_CASE("a user sent to its own worker arrives as another fork") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(0, {rref});
  group.network.drain();
  REQUIRE(user(group.kept.at(0)));
  CHECK(user(group.kept[0])->forkId() != user(rref)->forkId());
  CHECK(group.info(1).forks == 2);
  rref.reset();
  group.network.drain();
  CHECK(fetched(group, 0, group.kept[0]).ok());
  group.kept.clear();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("an owner's RRef sent to its own worker arrives as the same RRef") {
  SimGroup group(1);
  auto rref = group[0].rrefs().createOwner();
  group[0].call(0, {rref});
  group.network.drain();
  CHECK(group.kept.at(0) == rref);
  CHECK(group.clean());
}

TEST_CASE("replies carry RRefs as requests do") {
  RRefPtr returned;
  RRefNode::Hooks hooks;
  hooks.function = [](RRefNode& node, const auto&, auto) {
    auto rref = node.rrefs().createOwner();
    rref->setValue(7);
    return RRefNode::RRefs{rref};
  };
  SimGroup group(2, hooks);
  group[0].call(1, {}, [&](Result<RRefNode::RRefs> reply) { returned = reply.value().at(0); });
  group.network.drain();
  CHECK(fetched(group, 0, returned).value() == 7);
  returned.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a user in a reply is a child of the callee's RRef") {
  SimGroup group(3);
  RRefPtr returned;
  auto rref = group[1].remote(2);
  group.network.drain();
  // As if a function on node 1 had returned it.
  RRefFork child = group[1].rrefs().fork(rref, 0);
  group[0].rrefs().adopt({child}, false, [&](auto result) { returned = result.value().at(0); });
  rref.reset();
  CHECK_FALSE(user(returned)->confirmed());
  group.network.drain();
  CHECK(user(returned)->confirmed());
  CHECK(group.info(1).pending_children == 0);
  CHECK(fetched(group, 0, returned).ok());
  returned.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a fork for an unknown receiver is registered by the worker that receives it") {
  SimGroup group(3);
  SECTION("made by the owner") {
    auto rref = group[0].rrefs().createOwner();
    rref->setValue(5);
    group[0].call(2, {rref}, [](const auto&) {}, false);
    CHECK(group.info(0).forks == 1);
  }
  SECTION("made by a user") {
    auto rref = group[0].remote(1);
    group[0].call(2, {rref}, [](const auto&) {}, false);
  }
  REQUIRE(group.network.find(Kind::kCppCall) >= 0);
  group.network.drain();
  REQUIRE(group.kept.size() == 1);
  CHECK(user(group.kept[0])->confirmed());
  CHECK(fetched(group, 2, group.kept[0]).ok());
  group.kept.clear();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a fetch keeps the value until it is answered") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group.network.drain();
  std::optional<Result<int64_t>> got;
  group[0].fetch(user(rref), [&](Result<int64_t> value) { got = std::move(value); });
  rref.reset();
  CHECK(group.network.count(Kind::kRRefUserDelete) == 0);
  group.network.drain();
  CHECK(got->ok());
  CHECK(group.clean());
}

TEST_CASE("a fetch of an RRef with an error fails with that error") {
  SimGroup group(2);
  auto rref = group[0].rrefs().createOwner();
  rref->setError(Error(ErrorCode::kUserException, "it raised", "worker0"));
  group[0].call(1, {rref});
  group.network.drain();
  CHECK(fetched(group, 1, group.kept.at(0)).error().code() == ErrorCode::kUserException);
}
