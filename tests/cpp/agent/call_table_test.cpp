// The call table: each entry is taken out once.

#include "calls/call_table.h"

#include <catch2/catch.hpp>

#include <thread>

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

CallId add(CallTable& table, TimePoint deadline = kNever, uint64_t link = 0) {
  const auto id = table.nextId();
  ClientCall call{.to = 1, .link = link, .deadline = deadline};
  bool needs_timer = false;
  REQUIRE(table.add(id, call, needs_timer));
  return id;
}

const TimePoint kStart = TimePoint() + 1h;

}  // namespace

TEST_CASE("a call is taken once") {
  CallTable table;
  const auto id = add(table);
  CHECK(table.take(id));
  CHECK_FALSE(table.take(id));
  CHECK(table.size() == 0);
}

TEST_CASE("a table that is full has no capacity until a call is taken or the table is closed") {
  CallTable table;
  CHECK(table.waitForCapacity(0s));
  const auto id = table.nextId();
  ClientCall large{.to = 1, .bytes = size_t{1} << 31};
  bool needs_timer = false;
  REQUIRE(table.add(id, large, needs_timer));
  CHECK_FALSE(table.waitForCapacity(1ms));
  const bool closes = GENERATE(true, false);
  std::jthread makes_room([&] { closes ? void(table.close()) : void(table.take(id)); });
  CHECK(table.waitForCapacity(20s));
}

TEST_CASE("a timer is needed for a deadline that is earlier than all before it, and for no other") {
  CallTable table;
  bool needs_timer = false;
  for (auto [deadline, expected] : {std::pair(kStart + 5s, true), {kStart + 9s, false}, {kStart + 1s, true}}) {
    ClientCall call{.deadline = deadline};
    REQUIRE(table.add(table.nextId(), call, needs_timer));
    CHECK(needs_timer == expected);
  }
}

TEST_CASE("of calls one after the other only the first needs a timer, until that has fired") {
  CallTable table;
  TimePoint next;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 3; ++i) {
      bool needs_timer = false;
      ClientCall call{.deadline = kStart + round * 1h + i * 1s};
      const auto id = table.nextId();
      REQUIRE(table.add(id, call, needs_timer));
      CHECK(needs_timer == (i == 0));
      table.take(id);
    }
    CHECK(table.takeExpired(kStart + round * 1h, next).empty());
    CHECK(next == kNever);
  }
}

TEST_CASE("takeExpired() before the time of the timer asks for no other timer") {
  CallTable table;
  add(table, kStart + 2s);
  TimePoint next;
  CHECK(table.takeExpired(kStart + 1s, next).empty());
  CHECK(next == kNever);
  CHECK(table.takeExpired(kStart + 2s, next).size() == 1);
}

TEST_CASE("expired calls are taken in the order of their deadlines") {
  CallTable table;
  add(table, kStart + 2s);
  add(table, kStart + 1s);
  add(table, kStart + 3s);
  add(table);
  TimePoint next;
  const auto expired = table.takeExpired(kStart + 2s, next);
  REQUIRE(expired.size() == 2);
  CHECK(expired[0].deadline == kStart + 1s);
  CHECK(next == kStart + 3s);
  CHECK(table.takeExpired(kStart + 3s, next).size() == 1);
  CHECK(next == kNever);
  CHECK(table.size() == 1);
}

TEST_CASE("a call that has been taken does not expire") {
  CallTable table;
  table.take(add(table, kStart));
  TimePoint next;
  CHECK(table.takeExpired(kStart + 1s, next).empty());
}

TEST_CASE("calls keep their deadlines while many others end") {
  CallTable table;
  add(table, kStart + 2h);
  add(table, kStart + 1s);
  for (int i = 500; i > 0; --i) REQUIRE(table.take(add(table, kStart + i * 1s)));
  TimePoint next;
  const auto expired = table.takeExpired(kStart + 1h, next);
  REQUIRE(expired.size() == 1);
  CHECK(expired[0].deadline == kStart + 1s);
  CHECK(next == kStart + 2h);
}

TEST_CASE("takeLink() takes the calls of that link only") {
  CallTable table;
  add(table, kNever, 1);
  const auto other = add(table, kNever, 2);
  const auto late = add(table);
  CHECK(table.assign(late, 1, {1, 7}));
  CHECK(table.takeLink(1).size() == 2);
  CHECK(table.take(other));
  CHECK_FALSE(table.assign(late, 1, {1, 7}));
}

TEST_CASE("takeFor() takes a call only for the peer to which it was sent, over any link") {
  CallTable table;
  const auto id = add(table);  // to worker 1
  const auto isForeign = [&](PeerId from) {
    bool is_foreign = false;
    REQUIRE_FALSE(table.takeFor(id, from, is_foreign));
    return is_foreign;
  };
  CHECK(isForeign({1, 0}));  // not sent yet
  CHECK(table.assign(id, 5, {1, 70}));
  CHECK(isForeign({2, 70}));
  CHECK(isForeign({1, 69}));
  CHECK(table.assign(id, 6, {1, 70}));  // repeated over another link
  bool is_foreign = false;
  CHECK(table.takeFor(id, {1, 70}, is_foreign));
  CHECK_FALSE(is_foreign);
  CHECK_FALSE(isForeign({2, 70}));  // late
}

TEST_CASE("close() takes all calls, and no call can be added after it") {
  CallTable table;
  add(table);
  CHECK(table.close().size() == 1);
  ClientCall call{.handler = [](const Result<Message>&) {}};
  bool needs_timer = false;
  CHECK_FALSE(table.add(table.nextId(), call, needs_timer));
  CHECK(call.handler);
}

TEST_CASE("the workers with outstanding requests are those of the calls in the table") {
  CallTable table;
  std::set<WorkerId> workers{7};
  const auto id = add(table);
  table.addOutstanding(workers);
  CHECK(workers == std::set<WorkerId>{1, 7});
  table.take(id);
  workers.clear();
  table.addOutstanding(workers);
  CHECK(workers.empty());
}

TEST_CASE("of two threads that take the same call one gets it") {
  CallTable table;
  std::vector<CallId> ids;
  for (int i = 0; i < 2000; ++i) ids.push_back(add(table));
  std::atomic<int> taken{0};
  auto takeAll = [&] {
    for (auto id : ids) taken += table.take(id).has_value();
  };
  std::thread other(takeAll);
  takeAll();
  other.join();
  CHECK(taken == 2000);
}
