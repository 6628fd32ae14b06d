// Workers that die: what they held is released, what they owned fails.

#include "rref/sim_group.h"

using namespace torchrpc;
using namespace torchrpc::testing;

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
