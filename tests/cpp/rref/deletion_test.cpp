// Deletions of many RRefs: how many messages they take, and what becomes of those that wait.

#include "rref/sim_group.h"

using namespace torchrpc;
using namespace torchrpc::testing;

namespace {

/// RRefs of worker 0 to values of worker 1.
std::vector<RRefPtr> makeMany(SimGroup& group, size_t count) {
  std::vector<RRefPtr> rrefs;
  for (size_t i = 0; i < count; ++i) rrefs.push_back(group[0].remote(1));
  group.network.drain();
  REQUIRE(group.info(1).owner_rrefs == count);
  return rrefs;
}

}  // namespace

TEST_CASE("the deletions of many RRefs go together, and those of few at once") {
  SimGroup group(2);
  const size_t count = GENERATE(size_t{1}, size_t{2}, 3 * kMostDeletions + 2);
  auto rrefs = makeMany(group, count);
  rrefs.clear();
  size_t messages = 0;
  for (;;) {
    if (group.network.deliverFirst(Kind::kRRefUserDelete)) {
      ++messages;
    } else if (!group.network.deliverFirst(Kind::kRRefUserDelete, true)) {
      break;
    }
  }
  CHECK(messages == std::min<size_t>(count, 5));
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("a message of deletions that is lost, or arrives twice, deletes each fork once") {
  SimGroup group(2);
  auto rrefs = makeMany(group, 100);
  const auto kept = rrefs.front();
  rrefs.clear();
  group.network.drop(static_cast<size_t>(group.network.find(Kind::kRRefUserDelete)));
  while (group.network.count(Kind::kRRefUserDelete) > 0) {
    group.network.repeat(static_cast<size_t>(group.network.find(Kind::kRRefUserDelete)));
    REQUIRE(group.network.deliverFirst(Kind::kRRefUserDelete));
    while (group.network.deliverFirst(Kind::kRRefUserDelete, true)) {
    }
  }
  CHECK(group.info(1).forks == 1);
  CHECK(fetched(group, 0, kept).ok());
}

TEST_CASE("deletions that wait for an owner that is lost are dropped, and those to a later start of it are sent") {
  SimGroup group(2);
  group.network.incarnations = {{0, 10}, {1, 10}};
  auto rrefs = makeMany(group, 100);
  rrefs.clear();  // two messages are under way
  group.network.incarnations[1] = 20;
  group[0].rrefs().onWorkerJoined({SimNetwork::info(1), 20});
  size_t messages = 0;
  for (; group.network.deliverFirst(Kind::kRRefUserDelete); ++messages) {
    while (group.network.deliverFirst(Kind::kRRefUserDelete, true)) {
    }
  }
  CHECK(messages == 2);
  auto rref = group[0].remote(1);
  group.network.drain();
  const auto forks = group.info(1).forks;
  rref.reset();
  group.network.drain();
  CHECK(group.info(1).forks == forks - 1);
}
