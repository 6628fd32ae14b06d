// The RRef protocol, case by case: what travels, who is told, and what each kind of bad luck does to it.

#include "rref/sim_group.h"

using namespace torchrpc;
using namespace torchrpc::testing;
using Catch::Matchers::Contains;

TEST_CASE("remote() gives a user at once, which the reply confirms") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  CHECK_FALSE(user(rref)->confirmed());
  CHECK(group.info(0).pending_users == 1);
  CHECK(rref->id() == RRefId{0, 0});
  CHECK(user(rref)->forkId() == ForkId{0, 1});
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

TEST_CASE("a value of one's own is in no table until it is forked, and goes with its last fork") {
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
  REQUIRE(group.network.deliverFirst(Kind::kNativeCall));
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
  REQUIRE(group.network.deliverFirst(Kind::kNativeCall));
  CHECK(group.network.tasks() == 0);
  CHECK(group.info(2).pending_users == 1);
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest));
  CHECK(group.network.tasks() == 0);
  CHECK(group.info(1).forks == 2);
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest, true));
  CHECK(group.network.tasks() == 1);
}

TEST_CASE("a parent lives until its child is known to the owner") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(2, {rref});
  rref.reset();
  CHECK(group.info(0).pending_children == 1);
  REQUIRE(group.network.deliverFirst(Kind::kNativeCall));
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

TEST_CASE("a fork that comes home becomes the owner's own RRef") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(1, {rref});
  rref.reset();
  group.network.drain();
  REQUIRE(group.kept.size() == 1);
  REQUIRE(owner(group.kept[0]));
  CHECK(owner(group.kept[0])->wait(Duration::zero()).toInt() == 0);
  CHECK(group.clean());
}

TEST_CASE("a fork that comes home before the call that makes the value finds the same RRef") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group[0].call(1, {rref});
  rref.reset();
  REQUIRE(group.network.deliverFirst(Kind::kNativeCall));
  group.network.runTask(0);
  REQUIRE(owner(group.kept.at(0)));
  CHECK_FALSE(owner(group.kept[0])->ready());
  group.network.drain();
  CHECK(owner(group.kept[0])->ready());
  CHECK(group.clean());
}

TEST_CASE("a child may register before the call that makes the value arrives") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group[0].call(2, {rref});
  REQUIRE(group.network.deliverFirst(Kind::kNativeCall));
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

TEST_CASE("remote() to oneself gives the owner's RRef, kept until the call is answered") {
  SimGroup group(1);
  auto rref = group[0].remote(0);
  REQUIRE(owner(rref));
  CHECK(group.info(0).owner_rrefs == 1);
  SECTION("held by the caller") {
    group.network.drain();
    CHECK(owner(rref)->wait(Duration::zero()).toInt() == 0);
  }
  SECTION("held by nobody") {
    std::weak_ptr<RRef> weak = rref;
    rref.reset();
    CHECK_FALSE(weak.expired());
    group.network.drain();
    CHECK(weak.expired());
  }
  CHECK(group.clean());
}

TEST_CASE("a remote() to oneself that times out fails, and is not run late") {
  SimGroup group(1);
  auto rref = group[0].remote(0);
  group.network.timeOut(group.network.openCalls().at(0));
  group.network.drain();
  CHECK_THROWS_WITH(owner(rref)->wait(Duration::zero()), Contains("RRef creation via rpc.remote() timed out"));
  CHECK_THROWS_WITH(group[0].rrefs().fork(rref, 0), Contains("RRef creation"));
  CHECK(group.clean());
}

TEST_CASE("an RRef sent to oneself is another fork of it") {
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

TEST_CASE("an owner's RRef sent to oneself stays the owner's RRef") {
  SimGroup group(1);
  auto rref = group[0].rrefs().createOwner();
  group[0].call(0, {rref});
  group.network.drain();
  CHECK(group.kept.at(0) == rref);
  CHECK(group.clean());
}

TEST_CASE("RRefs travel in replies as in requests") {
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

TEST_CASE("a user's RRef in a reply is a child of the callee's") {
  SimGroup group(3);
  RRefPtr returned;
  auto rref = group[1].remote(2);
  group.network.drain();
  // A function of node 1's own choosing returns it.
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

TEST_CASE("a fork for nobody in particular is registered by whoever takes it in") {
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
  REQUIRE(group.network.find(Kind::kNativeCall) >= 0);
  group.network.drain();
  REQUIRE(group.kept.size() == 1);
  CHECK(user(group.kept[0])->confirmed());
  CHECK(fetched(group, 2, group.kept[0]).ok());
  group.kept.clear();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a message that was never delivered gives its forks back") {
  SimGroup group(3);
  SECTION("a user's") {
    auto rref = group[0].remote(1);
    group.network.drain();
    group[0].call(2, {rref});
  }
  SECTION("the owner's") {
    group[0].call(2, {group[0].rrefs().createOwner()});
  }
  group.network.drop(0);
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("control messages that are lost are sent again until they are answered") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(2, {rref});
  rref.reset();
  for (const auto kind : {Kind::kNativeCall, Kind::kRRefForkRequest, Kind::kRRefChildAccept, Kind::kRRefUserDelete}) {
    if (kind != Kind::kNativeCall) {
      const auto lost = group.network.find(kind);
      REQUIRE(lost >= 0);
      group.network.drop(static_cast<size_t>(lost));
      REQUIRE(group.network.deliverFirst(kind));
      const auto lost_reply = group.network.find(kind, true);
      REQUIRE(lost_reply >= 0);
      group.network.drop(static_cast<size_t>(lost_reply));
    }
    REQUIRE(group.network.deliverFirst(kind));
    group.network.deliverFirst(kind, true);
  }
  group.network.drain();
  group.kept.clear();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a registration that comes again after the fork's deletion leaves nothing behind") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(2, {rref});
  REQUIRE(group.network.deliverFirst(Kind::kNativeCall));
  group.network.repeat(static_cast<size_t>(group.network.find(Kind::kRRefForkRequest)));  // one copy stays behind
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest, true));
  group.network.runTask(0);
  group.kept.clear();
  REQUIRE(group.network.deliverFirst(Kind::kRRefUserDelete));
  CHECK(group.info(1).forks == 1);
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest));
  CHECK(group.info(1).forks == 1);
  rref.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a remote call that comes again runs once, and makes nothing after the deletion") {
  int runs = 0;
  RRefNode::Hooks hooks;
  hooks.remote_function = [&](auto&, auto&, auto) { return c10::IValue(++runs); };
  SimGroup group(2, hooks);
  auto rref = group[0].remote(1);
  group.network.repeat(0);
  group.network.repeat(0);
  group.network.runTask(0);
  REQUIRE(group.network.deliverFirst(Kind::kNativeRemote, true));
  CHECK(user(rref)->confirmed());
  rref.reset();
  REQUIRE(group.network.deliverFirst(Kind::kRRefUserDelete));
  CHECK(group.info(1).owner_rrefs == 0);
  group.network.drain();
  CHECK(runs == 1);
  CHECK(group.clean());
}

TEST_CASE("a remote() that times out fails its RRef, with the words that scripts look for") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group.network.timeOut(group.network.openCalls().at(0));
  REQUIRE(user(rref)->failure());
  CHECK(user(rref)->failure()->code() == ErrorCode::kRRefCreation);
  CHECK_THAT(user(rref)->failure()->text(),
             Contains("RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node "
                      "does not exist."));
  CHECK_THAT(user(rref)->failure()->text(), Contains("RPC ran for more than set timeout"));
  CHECK_THROWS_WITH(group[0].rrefs().fork(rref, 1), Contains("RRef creation"));
  CHECK(fetched(group, 0, rref).error().code() == ErrorCode::kRRefCreation);
  CHECK(group.info(0).pending_users == 0);

  // The call came all the same: the owner keeps the value while the RRef is held.
  CHECK(group.info(1).owner_rrefs == 1);
  rref.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a remote call that comes after its deletion is not run") {
  int runs = 0;
  RRefNode::Hooks hooks;
  hooks.remote_function = [&](auto&, auto&, auto) { return c10::IValue(++runs); };
  SimGroup group(2, hooks);
  auto rref = group[0].remote(1);
  group.network.timeOut(group.network.openCalls().at(0));
  rref.reset();
  REQUIRE(group.network.deliverFirst(Kind::kRRefUserDelete));
  group.network.drain();
  CHECK(runs == 0);
  CHECK(group.clean());
  CHECK(group.info(1).number_runs == 1);
}

TEST_CASE("those who hold a child of a remote() that never arrived are told so") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group[0].call(2, {rref});
  REQUIRE(group.network.deliverFirst(Kind::kNativeCall));
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest));
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest, true));
  REQUIRE(group.network.deliverFirst(Kind::kRRefChildAccept));
  group.network.runTask(0);
  std::optional<Result<int64_t>> got;
  group[2].fetch(user(group.kept.at(0)), [&](Result<int64_t> value) { got = std::move(value); });
  REQUIRE(group.network.deliverFirst(Kind::kRRefFetch));
  CHECK_FALSE(got);
  group.network.drop(static_cast<size_t>(group.network.find(Kind::kNativeRemote)));
  rref.reset();
  group.network.drain();
  REQUIRE(got);
  CHECK(got->error().code() == ErrorCode::kRRefCreation);
  group.kept.clear();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a fetch under way fails as soon as its RRef's creation does") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  std::optional<Result<int64_t>> got;
  group[0].fetch(user(rref), [&](Result<int64_t> value) { got = std::move(value); });
  group.network.drop(static_cast<size_t>(group.network.find(Kind::kNativeRemote)));
  REQUIRE(got);
  CHECK(got->error().code() == ErrorCode::kRRefCreation);
}

TEST_CASE("a fetch that has failed with its RRef's creation does not keep the RRef") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group[0].fetch(user(rref), [](const auto&) {});
  rref.reset();
  group.network.drop(static_cast<size_t>(group.network.find(Kind::kNativeRemote)));
  CHECK(group.network.count(Kind::kRRefUserDelete) == 1);
  group.network.drain();
  CHECK(group.network.openCalls().empty());
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

TEST_CASE("a fetch answers with the error in the value's place") {
  SimGroup group(2);
  auto rref = group[0].rrefs().createOwner();
  rref->setError(Error(ErrorCode::kUserException, "it raised", "worker0"));
  group[0].call(1, {rref});
  group.network.drain();
  CHECK(fetched(group, 1, group.kept.at(0)).error().code() == ErrorCode::kUserException);
}

TEST_CASE("a carrier that comes again gives the same RRef, or an error once that is gone") {
  SimGroup group(3);
  const bool from_owner = GENERATE(true, false);
  auto rref = from_owner ? RRefPtr(group[0].rrefs().createOwner()) : group[0].remote(1);
  group.network.drain();
  const auto fork = group[0].rrefs().fork(rref, 2);
  RRefPtr first, second;
  group[2].rrefs().adopt({fork}, true, [&](auto result) { first = result.value().at(0); });
  group.network.drain();
  group[2].rrefs().adopt({fork}, true, [&](auto result) { second = result.value().at(0); });
  CHECK(first == second);
  first.reset();
  second.reset();
  group.network.drain();
  std::optional<ErrorCode> error;
  group[2].rrefs().adopt({fork}, true, [&](auto result) { error = result.error().code(); });
  CHECK(error == ErrorCode::kRRefDeleted);
  rref.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a deletion that comes late does not touch a fork registered again since") {
  SimGroup group(2);
  auto rref = group[0].rrefs().createOwner();
  const auto fork = group[0].rrefs().fork(rref, kNoWorker);
  const auto other = group[0].rrefs().fork(rref, kNoWorker);  // keeps the value meanwhile
  RRefPtr adopted;
  const auto adopt = [&] {
    group[1].rrefs().adopt({fork}, true, [&](auto result) { adopted = result.value().at(0); });
    group.network.drain();
  };
  adopt();
  adopted.reset();
  group.network.repeat(static_cast<size_t>(group.network.find(Kind::kRRefUserDelete)));
  CHECK(group.info(0).forks == 1);
  const auto index = static_cast<size_t>(group.network.find(Kind::kRRefUserDelete));
  group[1].rrefs().adopt({fork}, true, [&](auto result) { adopted = result.value().at(0); });
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest));
  CHECK(group.info(0).forks == 2);
  group.network.deliver(index);
  CHECK(group.info(0).forks == 2);
  group.network.drain();
  adopted.reset();
  group[0].rrefs().abandon({other});
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("the death of a holder releases what it held") {
  SimGroup group(3);
  auto rref = group[0].rrefs().createOwner();
  group[0].call(1, {rref});
  group.network.drain();
  CHECK(group.info(0).forks == 1);
  group.network.kill(1);
  group.kept.clear();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("the death of a receiver releases the children in flight to it") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(2, {rref});
  group.network.kill(2);
  group.network.drain();
  CHECK(group.info(0).pending_children == 0);
  rref.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("the death of a parent with a child in flight is an error for the child, not a hang") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(2, {rref});
  group.network.kill(0);
  rref.reset();
  while (!group.network.notices().empty()) group.network.notify(0);
  CHECK(group.info(1).owner_rrefs == 0);
  group.network.drain();
  CHECK(group.kept.empty());
  CHECK(group.clean());
}

TEST_CASE("a child that is registered survives its parent's death") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(2, {rref});
  group.network.drain();
  group.network.kill(0);
  rref.reset();
  group.network.drain();
  CHECK(fetched(group, 2, group.kept.at(0)).ok());
}

TEST_CASE("the death of the owner fails its RRefs, confirmed or not") {
  SimGroup group(3);
  auto confirmed = group[0].remote(1);
  group.network.drain();
  auto pending = group[0].remote(1);
  group.network.kill(1);
  group.network.drain();
  for (const auto& rref : {confirmed, pending}) {
    REQUIRE(user(rref)->failure());
    CHECK_FALSE(user(rref)->confirmed());
    CHECK_THROWS_AS(group[0].rrefs().fork(rref, 2), Error);
  }
  CHECK(user(confirmed)->failure()->code() == ErrorCode::kWorkerLost);
  CHECK(user(confirmed)->failure()->worker() == "worker1");
  confirmed.reset();
  pending.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("an RRef that arrives when its owner is known to be dead has failed") {
  SimGroup group(2);
  const auto fork = group[0].rrefs().fork(group[0].rrefs().createOwner(), 1);
  group.network.kill(0);
  group.network.notify(0);
  std::optional<ErrorCode> error;
  group[1].rrefs().adopt({fork}, true, [&](auto result) { error = result.error().code(); });
  CHECK(error == ErrorCode::kWorkerLost);
  CHECK(group.clean());
}

TEST_CASE("a fork for a worker that is known to be dead keeps nothing") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group.network.drain();
  group.network.kill(2);
  group.network.drain();
  group[0].rrefs().fork(rref, 2);
  group[0].rrefs().fork(group[0].rrefs().createOwner(), 2);
  rref.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("what arrives from a dead worker late leaves nothing behind") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group.network.kill(0);
  rref.reset();
  group.network.notify(0);
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("deleteAllUsers deletes every user, so that none can be used any more") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group.network.drain();
  CHECK(group[0].rrefs().deleteAllUsers(std::chrono::seconds(1)));
  group.network.drain();
  CHECK(group.clean());
  const std::string named =
      "User RRef with RRefId=GloballyUniqueId(created_on=0, local_id=0) and "
      "ForkId=GloballyUniqueId(created_on=0, local_id=1) has been deleted. ";
  CHECK(fetched(group, 0, rref).error().text() == named + "Cannot call to_here() on it after deletion.");
  CHECK_THROWS_WITH(group[0].rrefs().fork(rref, 1), named + "Cannot call fork an UserRRef after deletion.");
  rref.reset();
  CHECK(group.network.packets().empty());  // the owner has been told once
}

TEST_CASE("deleteAllUsers says so when its time is up, and deletes them all the same") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  CHECK_FALSE(group[0].rrefs().deleteAllUsers(std::chrono::milliseconds(1)));
  CHECK(user(rref)->deleted());
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("deleteAllUsers waits for those who hold this node's values") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group.network.drain();
  CHECK_FALSE(group[1].rrefs().deleteAllUsers(std::chrono::milliseconds(1)));
  CHECK(group[0].rrefs().deleteAllUsers(std::chrono::milliseconds(1)));
  group.network.drain();
  CHECK(group[1].rrefs().deleteAllUsers(std::chrono::milliseconds(1)));
}

TEST_CASE("destroy names what leaks, and settles what waits") {
  SimGroup group(2);
  auto held = group[0].remote(1);
  group.network.drain();
  auto pending = group[0].remote(1);
  const auto leaks = group[1].rrefs().destroy();
  REQUIRE(leaks.size() == 1);
  CHECK(leaks[0] ==
        "Leaking RRef GloballyUniqueId(created_on=0, local_id=0) with fork Id GloballyUniqueId(created_on=0, "
        "local_id=1), held by worker0.");
  CHECK(group[0].rrefs().destroy().empty());
  CHECK(user(pending)->failure()->code() == ErrorCode::kShutdown);
  CHECK(user(held)->deleted());
  CHECK(group.clean());
}

TEST_CASE("malformed messages are refused, and change nothing") {
  SimGroup group(2);
  for (const auto kind : {Kind::kRRefForkRequest, Kind::kRRefChildAccept, Kind::kRRefUserDelete, Kind::kRRefFetch}) {
    Message message;
    message.kind = kind;
    message.payload = "short";
    std::optional<Result<Message>> answer;
    group.network.node(0).request(1, message, {}, [&](Result<Message> reply) { answer = std::move(reply); });
    group.network.drain();
    REQUIRE(answer);
    CHECK(answer->error().code() == ErrorCode::kProtocol);
  }
  CHECK(group.clean());
  CHECK_THROWS_AS(decodeForks("too short for a fork"), Error);
}

TEST_CASE("forks survive their encoding") {
  const std::vector<RRefFork> forks{{{0, 1}, {2, 3}, 4, 5, 6, 7}, {{1, 8}, {2, 9}, 0, 1, kNoNumber, kNoNumber}};
  CHECK((decodeForks(encodeForks(forks)) == forks));
  CHECK(decodeForks("").empty());
}

TEST_CASE("the first result of an RRef is the one that counts") {
  OwnerRRef rref({0, 0}, SimNetwork::info(0));
  int told = 0;
  rref.whenReady([&](const Result<c10::IValue>& value) { told += value.value().toInt() == 1; });
  CHECK(rref.setValue(1));
  CHECK_FALSE(rref.setValue(2));
  CHECK_FALSE(rref.setError(Error(ErrorCode::kUnknown, "late")));
  rref.whenReady([&](const Result<c10::IValue>& value) { told += value.value().toInt() == 1; });
  CHECK(told == 2);
  CHECK(rref.wait(std::chrono::milliseconds(1)).toInt() == 1);
}

TEST_CASE("waiting for a value ends with its time") {
  OwnerRRef rref({0, 0}, SimNetwork::info(0));
  try {
    rref.wait(std::chrono::milliseconds(1));
    FAIL("it has no value");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kTimeout);
  }
}
