#include "agent/announcer.h"

#include <catch2/catch.hpp>

#include <atomic>
#include <future>
#include <map>
#include <set>

#include "agent/loopback_group.h"
#include "outcomes.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

constexpr WorkerId kAnnounced = 5;

/// A group whose members count the announcements that they get.
struct Listeners {
  explicit Listeners(int size, bool is_direct = false) : group({.size = size}) {
    for (int id = 0; id < size; ++id) {
      auto accept = [this, id](const WorkerRecord& record) {
        MutexLock lock(mutex);
        if (record.info.id == kAnnounced) ++told[id];
        return refusal;
      };
      announcers.push_back(
          std::make_unique<Announcer>(group[id], Announcer::Options{.is_direct = is_direct, .accept = accept}));
      group[id].on(Kind::kMemberJoined, Messenger::Where::kLoop, [this, id](const Request& request, const auto& done) {
        if (id != silent) return announcers[id]->serve(request, done);
        MutexLock lock(mutex);
        held.push_back(done);
      });
      everyone.push_back(id);
    }
    group.start();
  }
  ~Listeners() {
    std::vector<Responder> unanswered;
    {
      MutexLock lock(mutex);
      unanswered.swap(held);
    }
    unanswered.clear();  // which answers
    for (const auto id : everyone) group[id].close();
  }

  Result<std::vector<WorkerId>> announce(WorkerId from = kAnnounced) {
    std::promise<Result<std::vector<WorkerId>>> unreached;
    auto others = everyone;
    std::erase(others, from);
    announcers[from]->announce(recordOf(from), others, [&](auto result) { unreached.set_value(std::move(result)); });
    auto future = unreached.get_future();
    REQUIRE(future.wait_for(30s) == std::future_status::ready);
    return future.get();
  }
  WorkerRecord recordOf(WorkerId id) {
    return {
        .info = LoopbackGroup::infoOf(id),
        .address = group.address(id),
        .incarnation = LoopbackGroup::incarnationOf(id)};
  }
  std::map<WorkerId, int> toldNow() {
    MutexLock lock(mutex);
    return told;
  }
  size_t links() {
    size_t ends = 0;
    for (const auto id : everyone) ends += group[id].counts().connections;
    return ends / 2;
  }
  /// What this member answers to MEMBER_JOINED with that payload, sent by kAnnounced.
  std::string errorOf(WorkerId to, const std::string& payload) {
    Pending pending;
    group[kAnnounced].request(to, {.kind = Kind::kMemberJoined, .payload = payload}, 20s, pending.handler());
    const auto reply = pending.get();
    return reply ? "" : reply.error().what();
  }

  Mutex mutex;
  std::map<WorkerId, int> told TORCHRPC_GUARDED_BY(mutex);  ///< how often
  Status refusal TORCHRPC_GUARDED_BY(mutex);
  std::vector<Responder> held TORCHRPC_GUARDED_BY(mutex);
  std::atomic<WorkerId> silent{kNoWorker};  ///< who does not answer
  std::vector<WorkerId> everyone;
  LoopbackGroup group;
  std::vector<std::unique_ptr<Announcer>> announcers;
};

std::string announcement(const WorkerRecord& record, const std::vector<WorkerId>& members) {
  std::string payload;
  Writer writer(payload);
  writer.putString(encodeRecord(record));
  for (const auto id : members) writer.put(id);
  return payload;
}

}  // namespace

TEST_CASE("an announcement reaches each member once, over a link or two of each") {
  for (const int size : {kAnnounced + 1, 9, 30, 100}) {
    Listeners listeners(size);
    CHECK(listeners.announce().take().empty());
    auto told = listeners.toldNow();
    CHECK(told.size() == static_cast<size_t>(size) - 1);
    CHECK_FALSE(told.contains(kAnnounced));
    for (const auto& [id, times] : told) CHECK(times == 1);
    CHECK(listeners.links() == static_cast<size_t>(size) - 1);
    // The next ones are announced over nearly the same links.
    for (const auto id : {0, 1, size / 2, size - 1}) CHECK(listeners.announce(id).take().empty());
    CHECK(listeners.links() <= static_cast<size_t>(4 * size));
  }
}

TEST_CASE("an announcement reaches a subtree whose root is lost") {
  Listeners listeners(100);
  listeners.announce().take();
  const std::set<WorkerId> lost{0, 1, 12, 13, 14, 99};
  for (const auto id : lost) listeners.group[id].close();
  const auto unreached = listeners.announce().take();
  CHECK(std::set<WorkerId>(unreached.begin(), unreached.end()) == lost);
  for (const auto& [id, times] : listeners.toldNow()) CHECK(times == (lost.contains(id) ? 1 : 2));
}

TEST_CASE("an announcement reaches a subtree whose root does not answer, and that root later") {
  Listeners listeners(30);
  listeners.silent = 0;
  CHECK(listeners.announce().take() == std::vector<WorkerId>{0});
  CHECK(listeners.toldNow().size() == 28);
  listeners.silent = kNoWorker;
  CHECK(eventually([&] { return listeners.toldNow().contains(0); }));
}

TEST_CASE("the announced worker gets the error of a member that refuses it") {
  Listeners listeners(30);
  {
    MutexLock lock(listeners.mutex);
    listeners.refusal = Error(ErrorCode::kRendezvous, "another world_size");
  }
  CHECK_THROWS_WITH(listeners.announce().take(), Catch::Contains("another world_size"));
}

TEST_CASE("announcements that are malformed, or of the wrong worker, are refused") {
  Listeners listeners(8);
  auto own = listeners.recordOf(kAnnounced), other = listeners.recordOf(3), renamed = other, moved = other;
  renamed.info.name = "another";
  moved.info.id = 4;
  CHECK(listeners.errorOf(0, announcement(own, {1, 2})).empty());
  CHECK(listeners.errorOf(0, announcement(other, {1, 2})).empty());
  CHECK_THAT(listeners.errorOf(3, announcement(other, {})), Catch::Contains("record of another worker"));
  CHECK_THAT(listeners.errorOf(0, announcement(renamed, {})), Catch::Contains("record of another worker"));
  CHECK_THAT(listeners.errorOf(0, announcement(moved, {})), Catch::Contains("record of another worker"));
  CHECK_THAT(
      listeners.errorOf(0, announcement(own, std::vector<WorkerId>(9, 1))), Catch::Contains("more members than"));
  const auto payload = announcement(own, {1, 2});
  for (size_t size = 0; size < payload.size() - 8; ++size) {
    CHECK_FALSE(listeners.errorOf(0, payload.substr(0, size)).empty());
  }
  CHECK_FALSE(listeners.errorOf(0, payload + "x").empty());
}

TEST_CASE("where workers prove their names, each announces itself to all members, and cannot announce another one") {
  Listeners listeners(40, /*is_direct=*/true);
  CHECK(listeners.announce().take().empty());
  CHECK(listeners.toldNow().size() == 39);
  CHECK(listeners.group[kAnnounced].counts().connections == 39);
  const auto own = listeners.recordOf(kAnnounced);
  auto earlier = own, later = own;
  --earlier.incarnation, ++later.incarnation;
  for (const auto& record : {listeners.recordOf(3), earlier, later}) {
    CHECK_THAT(listeners.errorOf(0, announcement(record, {})), Catch::Contains("a worker speaks only for itself"));
  }
  CHECK_THAT(listeners.errorOf(0, announcement(own, {1})), Catch::Contains("more members than"));
}
