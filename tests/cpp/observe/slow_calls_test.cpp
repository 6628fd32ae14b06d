#include "observe/slow_calls.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <latch>
#include <optional>

#include "agent/loopback_group.h"
#include "outcomes.h"
#include "testing/manual_timer.h"
#include "wire/codec.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

using Side = CallCounts::Side;

/// worker0 calls worker1, which answers when it is told to; both report calls that take 5 s.
struct WatchedPair {
  WatchedPair() {
    group[0].observeCalls(caller);
    group[1].observeCalls(callee);
    group[1].on(Kind::kCppCall, Messenger::Where::kPool, [this](const Request&, const Responder& responder) {
      held.emplace(responder);
      is_running.count_down();
    });
    group.start();
  }
  SlowCalls::Reporter into(std::vector<SlowCall>& list) {
    return [&list](const std::vector<SlowCall>& news) { list.insert(list.end(), news.begin(), news.end()); };
  }
  void call(const std::string& function) {
    std::string payload;
    Writer(payload).putString(function);
    group[0].request(1, {.kind = Kind::kCppCall, .payload = payload}, kNoLimit, pending.handler());
    is_running.wait();
  }
  /// Until the thread that ran the handler has left it.
  void waitUntilNoThreadServes() {
    const auto serves = [](const ThreadRecord::Snapshot& thread) { return !thread.served.empty(); };
    REQUIRE(eventually([&] { return std::ranges::none_of(ThreadRecord::all(), serves); }));
  }

  LoopbackGroup group{{.size = 2}};
  std::shared_ptr<ManualTimer> timer = std::make_shared<ManualTimer>();
  std::vector<SlowCall> of_caller, of_callee;
  CallMetrics uncounted{group[0], false};
  SlowCalls caller{group[0], uncounted, timer, 5s, into(of_caller)};
  SlowCalls callee{group[1], uncounted, timer, 5s, into(of_callee)};
  std::latch is_running{1};
  std::optional<Responder> held;
  Pending pending;
};

}  // namespace

TEST_CASE("a slow call is reported once by each side, and again when it has ended") {
  WatchedPair pair;
  pair.call("train");
  pair.waitUntilNoThreadServes();
  pair.timer->advance(4s);
  CHECK(pair.of_caller.empty());
  pair.timer->advance(2s);
  REQUIRE(pair.of_caller.size() == 1);
  REQUIRE(pair.of_callee.size() == 1);
  pair.timer->advance(10s);
  CHECK(pair.of_caller.size() == 1);
  const auto& out = pair.of_caller.front();
  CHECK(out.side == Side::kOut);
  CHECK((out.worker == "worker0" && out.peer == "worker1" && out.function == "train"));
  CHECK_FALSE(out.has_ended);
  CHECK(describe(out) == "worker0 has waited 5.0 s for worker1 to answer train");
  CHECK(
      describe(pair.of_callee.front()) ==
      "worker1 has served train for worker0 for 5.0 s; no thread serves it now: its result is a future");
  pair.held->reply({.kind = Kind::kReply});
  REQUIRE(pair.pending.get());
  pair.timer->advance(1s);
  REQUIRE(pair.of_caller.size() == 2);
  REQUIRE(pair.of_callee.size() == 2);
  CHECK(describe(pair.of_caller.back()) == "train on worker1, called by worker0, took 16.0 s");
  CHECK(describe(pair.of_callee.back()) == "train, which worker1 served for worker0, took 16.0 s");
}

TEST_CASE("a call that ends in time is not reported") {
  WatchedPair pair;
  pair.call("train");
  pair.timer->advance(4s);
  pair.held->reply({.kind = Kind::kReply});
  REQUIRE(pair.pending.get());
  pair.timer->advance(10s);
  CHECK(pair.of_caller.empty());
  CHECK(pair.of_callee.empty());
}

TEST_CASE("the report of a slow call's end says how it has failed") {
  WatchedPair pair;
  pair.call("train");
  pair.timer->advance(7s);
  pair.held->fail(Error(ErrorCode::kUserException, "no"));
  REQUIRE_FALSE(pair.pending.get());
  pair.timer->advance(1s);
  REQUIRE(pair.of_caller.size() == 2);
  CHECK(pair.of_caller.back().error == name(ErrorCode::kUserException));
  CHECK(describe(pair.of_caller.back()).ends_with("took 7.0 s and failed (user exception)"));
}

TEST_CASE("the report of a call that is served says what its thread waits for") {
  WatchedPair pair;
  std::latch may_end{1};
  pair.group[1].on(Kind::kScriptCall, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    const WaitScope waiting({.kind = ThreadWait::Kind::kReply, .to = 0});
    pair.is_running.count_down();
    may_end.wait();
    responder.reply({.kind = Kind::kReply});
  });
  pair.group[0].request(1, {.kind = Kind::kScriptCall}, kNoLimit, pair.pending.handler());
  pair.is_running.wait();
  pair.timer->advance(6s);
  REQUIRE(pair.of_callee.size() == 1);
  CHECK(describe(pair.of_callee.front()).ends_with("for worker0 for 5.0 s; its thread waits for a reply of worker0"));
  CHECK(pair.of_callee.front().thread != 0);
  may_end.count_down();
  REQUIRE(pair.pending.get());
}
