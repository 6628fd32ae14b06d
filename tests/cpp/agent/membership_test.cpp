// Which changes of members are reported, and how often.

#include "peers/membership.h"

#include <catch2/catch.hpp>

#include <latch>

#include "base/executor/thread_pool.h"

using namespace torchrpc;

namespace {

const WorkerInfo kWorker{"worker1", 1};

/// The changes that `act` causes, in the order of their reports.
std::vector<std::string> changesOf(const std::function<void(Membership&)>& act) {
  ThreadPool pool({.size = 2});
  Membership membership(pool);
  std::vector<std::string> seen;
  std::latch done(1);
  membership.addHandler([&](const WorkerInfo& worker, MemberChange change) {
    if (worker.id == 99) return done.count_down();
    seen.emplace_back(name(change));
  });
  act(membership);
  membership.onLost({{"last", 99}, 1});
  done.wait();
  pool.close(kNoLimit);
  return seen;
}

using Changes = std::vector<std::string>;

}  // namespace

TEST_CASE("the loss of a peer is reported once, however many connections end") {
  CHECK(changesOf([](Membership& members) {
          members.onLost({kWorker, 5});
          members.onLost({kWorker, 5});
          members.onJoined({kWorker, 6}, /*is_replaced=*/true);
          members.onJoined({kWorker, 6}, /*is_replaced=*/false);
          members.onLost({kWorker, 5});
          members.onLost({kWorker, 6});
        }) == Changes{"lost", "replaced", "lost"});
}

TEST_CASE("a lost worker that is heard again has joined, one that has left has not") {
  CHECK(changesOf([](Membership& members) {
          members.onActivity({kWorker, 5});
          members.onLost({kWorker, 5});
          members.onActivity({kWorker, 4});
          members.onActivity({kWorker, 5});
          members.onLeft({kWorker, 5});
          members.onLost({kWorker, 5});
          members.onActivity({kWorker, 5});
        }) == Changes{"lost", "joined", "left"});
}

TEST_CASE("those who are gone are not among the living") {
  ThreadPool pool({.size = 1});
  Membership membership(pool);
  const WorkerInfo other{"worker2", 2};
  membership.onLost({kWorker, 5});
  CHECK((membership.living({kWorker, other}) == std::vector{other}));
  membership.onJoined({kWorker, 6}, true);
  CHECK((membership.living({kWorker, other}) == std::vector{kWorker, other}));
  pool.close(kNoLimit);
}
