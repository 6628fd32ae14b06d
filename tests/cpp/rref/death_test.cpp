// Lost workers: the forks that they held are released, the RRefs that they owned fail.

#include "rref/owner_table.h"
#include "rref/sim_group.h"

using namespace torchrpc;
using namespace torchrpc::testing;

TEST_CASE("the loss of a holder releases its forks") {
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

TEST_CASE("the loss of a receiver releases the children in flight to it") {
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

TEST_CASE("the loss of a parent with a child in flight fails the child") {
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

TEST_CASE("a registered child survives the loss of its parent") {
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

TEST_CASE("the loss of the owner fails its RRefs, confirmed or not") {
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

TEST_CASE("an RRef that arrives after the loss of its owner has failed") {
  SimGroup group(2);
  const auto fork = group[0].rrefs().fork(group[0].rrefs().createOwner(), 1);
  group.network.kill(0);
  group.network.notify(0);
  std::optional<ErrorCode> error;
  group[1].rrefs().adopt({fork}, true, [&](auto result) { error = result.error().code(); });
  CHECK(error == ErrorCode::kWorkerLost);
  CHECK(group.clean());
}

TEST_CASE("a fork for a lost worker keeps nothing alive") {
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

TEST_CASE("late messages of a lost worker register nothing") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group.network.kill(0);
  rref.reset();
  group.network.notify(0);
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("an RRef of an earlier incarnation of its owner has failed when it arrives, and the owner is not asked") {
  SimGroup group(3);
  group.network.incarnations[1] = 1;
  auto rref = group[0].remote(1);
  group.network.drain();
  const auto fork = group[0].rrefs().fork(rref, 2);
  group.network.incarnations[1] = 2;
  group[2].rrefs().onWorkerJoined({SimNetwork::info(1), 2});
  std::optional<ErrorCode> error;
  group[2].rrefs().adopt({fork}, true, [&](auto result) { error = result.error().code(); });
  CHECK(error == ErrorCode::kWorkerLost);
  CHECK(group.network.count(Kind::kRRefForkRequest) == 0);
  group.network.drain();
  CHECK(group.info(0).pending_children == 0);
}

TEST_CASE("an owner that has been started again refuses a fork of its earlier incarnation") {
  SimGroup group(2);
  group.network.incarnations[1] = 1;
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(1, {rref});
  group.network.incarnations[1] = 2;
  rref.reset();
  group.network.drain();
  CHECK(group.info(0).pending_children == 0);
  CHECK(group.info(1).owner_rrefs == 0);
}

TEST_CASE(
    "an owner that knows of a restart refuses what the earlier incarnation sent, and keeps what the later one holds") {
  const auto self = std::make_shared<GroupMember>(WorkerInfo{"owner", 0}, "");
  OwnerTable table(self);
  const RRefId early{1, 9001}, late{1, 7};  // random
  OwnerTable::EndedList ended;
  CHECK(table.onWorkerJoined({1, 20}).empty());
  CHECK(table.host({1, 20}, {late, {1, 26}, 21}).created);
  CHECK(table.counts().forks == 1);
  CHECK_FALSE(table.host({1, 10}, {early, {1, 16}, 12}).created);
  CHECK(table.registerFork({1, 10}, {late, {1, 17}, kNoNumber, 13}));
  table.removeForks({1, 10}, {{early, {1, 16}, 12}}, ended);
  CHECK_FALSE(table.registerFork({1, 20}, {late, {1, 27}, kNoNumber, 22}));
  CHECK_FALSE(table.find({1, 10}, {early, {1, 16}, 12, 12}).ok());
  CHECK_FALSE(table.find({2, 10}, {early, {2, 16}, 12, 1}).ok());
  CHECK(table.counts().forks == 2);
  CHECK(table.counts().rrefs == 1);
  CHECK(table.onWorkerJoined({1, 20}).empty());
  CHECK(table.onWorkerJoined({1, 30}).size() == 1);
  CHECK(table.counts().rrefs == 0);
}

TEST_CASE("the news that an owner has been started again fails the RRefs of its earlier incarnation only") {
  SimGroup group(3);
  group.network.incarnations[1] = 1;
  auto earlier = group[0].remote(1);
  group.network.drain();
  group.network.incarnations[1] = 2;
  auto later = group[0].remote(1);
  group.network.drain();
  group[0].rrefs().onWorkerJoined({SimNetwork::info(1), 2});
  CHECK(user(earlier)->failure());
  CHECK_FALSE(user(later)->failure());
}
