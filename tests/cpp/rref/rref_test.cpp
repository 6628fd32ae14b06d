// The owner's RRef without a service, and the encoding of forks.

#include "rref/sim_group.h"

using namespace torchrpc;
using namespace torchrpc::testing;

namespace {

std::shared_ptr<const GroupMember> member(WorkerId id) {
  return std::shared_ptr<const GroupMember>(new GroupMember{SimNetwork::info(id), "loopback"});
}

}  // namespace

TEST_CASE("forks are decoded as they were encoded") {
  const std::vector<RRefFork> forks{
      {{0, 1}, {2, 3}, {4, 5}, {6, 7}, 8, 9}, {{1, 8}, {2, 9}, {0, 0}, {1, 0}, kNoNumber, kNoNumber}};
  CHECK((decodeForks(encodeForks(forks)) == forks));
  CHECK(decodeForks("").empty());
}

TEST_CASE("the first result of an RRef is kept, later ones are ignored") {
  OwnerRRef rref({0, 0}, member(0));
  int calls = 0;
  rref.whenReady([&](const Result<c10::IValue>& value) { calls += value.value().toInt() == 1; });
  CHECK(rref.setValue(1));
  CHECK_FALSE(rref.setValue(2));
  CHECK_FALSE(rref.setError(Error(ErrorCode::kUnknown, "late")));
  rref.whenReady([&](const Result<c10::IValue>& value) { calls += value.value().toInt() == 1; });
  CHECK(calls == 2);
  CHECK(rref.wait(std::chrono::milliseconds(1)).toInt() == 1);
}

TEST_CASE("waiting for a value ends with its timeout") {
  OwnerRRef rref({0, 0}, member(0));
  try {
    rref.wait(std::chrono::milliseconds(1));
    FAIL("it has no value");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kTimeout);
  }
}

TEST_CASE("liveness watches the owners of what a worker holds, and the holders of what it owns") {
  SimGroup group(3);
  const auto watched = [&](WorkerId id) {
    std::set<WorkerId> workers;
    group[id].rrefs().addOutstanding(workers);
    return workers;
  };
  auto rref = group[0].remote(1);
  group.network.drain();
  CHECK(watched(0) == std::set<WorkerId>{1});
  CHECK(watched(1) == std::set<WorkerId>{0});
  CHECK(watched(2).empty());
  rref.reset();
  group.network.drain();
  CHECK(watched(0).empty());
  CHECK(watched(1).empty());
}
