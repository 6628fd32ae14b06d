// The shutdown of a node: users are deleted, leaks are named, waiters get an error.

#include "rref/sim_group.h"

using namespace torchrpc;
using namespace torchrpc::testing;

TEST_CASE("deleteAllUsers deletes every user, and none can be used afterwards") {
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
  CHECK(group.network.packets().empty());  // the deletion is sent once
}

TEST_CASE("deleteAllUsers returns false at its timeout, and deletes the users nevertheless") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  CHECK_FALSE(group[0].rrefs().deleteAllUsers(std::chrono::milliseconds(1)));
  CHECK(user(rref)->deleted());
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("deleteAllUsers waits for the holders of this node's values") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group.network.drain();
  CHECK_FALSE(group[1].rrefs().deleteAllUsers(std::chrono::milliseconds(1)));
  CHECK(group[0].rrefs().deleteAllUsers(std::chrono::milliseconds(1)));
  group.network.drain();
  CHECK(group[1].rrefs().deleteAllUsers(std::chrono::milliseconds(1)));
}

TEST_CASE("destroy names leaks and settles pending RRefs") {
  SimGroup group(2);
  auto held = group[0].remote(1);
  group.network.drain();
  auto pending = group[0].remote(1);
  const auto leaks = group[1].rrefs().destroy();
  REQUIRE(leaks.size() == 1);
  CHECK(
      leaks[0] ==
      "Leaking RRef GloballyUniqueId(created_on=0, local_id=0) with fork Id GloballyUniqueId(created_on=0, "
      "local_id=1), held by worker0.");
  CHECK(group[0].rrefs().destroy().empty());
  CHECK(user(pending)->failure()->code() == ErrorCode::kShutdown);
  CHECK(user(held)->deleted());
  CHECK(group.clean());
}
