// Lost, late, reordered and repeated messages, and remote calls that fail: nothing leaks, nothing hangs.

#include "rref/sim_group.h"

using namespace torchrpc;
using namespace torchrpc::testing;
using Catch::Matchers::Contains;

TEST_CASE("the forks of a message that was never delivered are removed") {
  SimGroup group(3);
  SECTION("of a user") {
    auto rref = group[0].remote(1);
    group.network.drain();
    group[0].call(2, {rref});
  }
  SECTION("of the owner") { group[0].call(2, {group[0].rrefs().createOwner()}); }
  group.network.drop(0);
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("reliable messages that are lost are sent again until they are answered") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(2, {rref});
  rref.reset();
  for (const auto kind : {Kind::kCppCall, Kind::kRRefForkRequest, Kind::kRRefChildAccept, Kind::kRRefUserDelete}) {
    if (kind != Kind::kCppCall) {
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

TEST_CASE("a registration that is repeated after the deletion of its fork registers nothing") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group.network.drain();
  group[0].call(2, {rref});
  REQUIRE(group.network.deliverFirst(Kind::kCppCall));
  group.network.repeat(static_cast<size_t>(group.network.find(Kind::kRRefForkRequest)));  // one copy remains
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

TEST_CASE("a repeated remote call runs once, and makes nothing after its deletion") {
  int runs = 0;
  RRefNode::Hooks hooks;
  hooks.remote_function = [&](auto&, auto&, auto) { return c10::IValue(++runs); };
  SimGroup group(2, hooks);
  auto rref = group[0].remote(1);
  group.network.repeat(0);
  group.network.repeat(0);
  group.network.runTask(0);
  REQUIRE(group.network.deliverFirst(Kind::kCppRemote, true));
  CHECK(user(rref)->confirmed());
  rref.reset();
  REQUIRE(group.network.deliverFirst(Kind::kRRefUserDelete));
  CHECK(group.info(1).owner_rrefs == 0);
  group.network.drain();
  CHECK(runs == 1);
  CHECK(group.clean());
}

TEST_CASE("a remote() that times out fails its RRef, with the text that scripts match on") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group.network.timeOut(group.network.openCalls().at(0));
  REQUIRE(user(rref)->failure());
  CHECK(user(rref)->failure()->code() == ErrorCode::kRRefCreationTimeout);
  CHECK_THAT(
      user(rref)->failure()->text(),
      Contains("RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node "
               "does not exist."));
  CHECK_THAT(user(rref)->failure()->text(), Contains("RPC ran for more than set timeout"));
  CHECK_THROWS_WITH(group[0].rrefs().fork(rref, 1), Contains("RRef creation"));
  CHECK(fetched(group, 0, rref).error().code() == ErrorCode::kRRefCreationTimeout);
  CHECK(group.info(0).pending_users == 0);

  // The call arrived nevertheless: the owner keeps the value while the RRef is held.
  CHECK(group.info(1).owner_rrefs == 1);
  rref.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a remote call that arrives after its deletion is not run") {
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

TEST_CASE("a remote() to the same worker that times out fails, and is not run later") {
  SimGroup group(1);
  auto rref = group[0].remote(0);
  group.network.timeOut(group.network.openCalls().at(0));
  group.network.drain();
  CHECK_THROWS_WITH(owner(rref)->wait(kNoLimit), Contains("RRef creation via rpc.remote() timed out"));
  CHECK_THROWS_WITH(group[0].rrefs().fork(rref, 0), Contains("RRef creation"));
  CHECK(group.clean());
}

TEST_CASE("holders of a child get an error if the remote() never arrives") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group[0].call(2, {rref});
  REQUIRE(group.network.deliverFirst(Kind::kCppCall));
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest));
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest, true));
  REQUIRE(group.network.deliverFirst(Kind::kRRefChildAccept));
  group.network.runTask(0);
  std::optional<Result<int64_t>> got;
  group[2].fetch(user(group.kept.at(0)), [&](Result<int64_t> value) { got = std::move(value); });
  REQUIRE(group.network.deliverFirst(Kind::kRRefFetch));
  CHECK_FALSE(got);
  group.network.drop(static_cast<size_t>(group.network.find(Kind::kCppRemote)));
  rref.reset();
  group.network.drain();
  REQUIRE(got);
  CHECK(got->error().code() == ErrorCode::kRRefCreation);
  group.kept.clear();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a fetch under way fails as soon as the creation of its RRef fails") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  std::optional<Result<int64_t>> got;
  group[0].fetch(user(rref), [&](Result<int64_t> value) { got = std::move(value); });
  group.network.drop(static_cast<size_t>(group.network.find(Kind::kCppRemote)));
  REQUIRE(got);
  CHECK(got->error().code() == ErrorCode::kRRefCreationTimeout);
}

TEST_CASE("a fetch that has failed with the creation of its RRef does not keep the RRef alive") {
  SimGroup group(2);
  auto rref = group[0].remote(1);
  group[0].fetch(user(rref), [](const auto&) {});
  rref.reset();
  group.network.drop(static_cast<size_t>(group.network.find(Kind::kCppRemote)));
  CHECK(group.network.count(Kind::kRRefUserDelete) == 1);
  group.network.drain();
  CHECK(group.network.openCalls().empty());
  CHECK(group.clean());
}

TEST_CASE("RRefs in a value that arrives too late are released") {
  RRefNode::Hooks hooks;
  hooks.inside_values = [](RRefNode& node) { return RRefNode::RRefs{node.rrefs().createOwner()}; };
  SimGroup group(2, hooks);
  auto rref = group[0].remote(1);
  group[0].fetch(user(rref), [](const auto&) {});
  const auto fetch_fails = GENERATE(true, false);
  group.network.timeOut(group.network.openCalls().at(fetch_fails ? 1 : 0));  // the fetch itself, or the creation
  group.network.drain();
  CHECK(group.info(1).forks == 1);
  rref.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a repeated fork gives the same RRef, or an error once that is destroyed") {
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

TEST_CASE("a late deletion does not remove a fork that was registered again since") {
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

TEST_CASE("malformed messages are refused, and change nothing") {
  SimGroup group(2);
  for (const auto kind : {Kind::kRRefForkRequest, Kind::kRRefChildAccept, Kind::kRRefUserDelete, Kind::kRRefFetch}) {
    Message message;
    message.kind = kind;
    message.payload = "short";
    std::optional<Result<Message>> answer;
    group.network.node(0).request(
        1, Message(message), kNoLimit, [&](Result<Message> reply) { answer = std::move(reply); });
    group.network.drain();
    REQUIRE(answer);
    CHECK(answer->error().code() == ErrorCode::kProtocol);
  }
  CHECK(group.clean());
  CHECK_THROWS_AS(decodeForks("too short for a fork"), Error);
}
