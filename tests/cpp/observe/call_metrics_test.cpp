#include "observe/call_metrics.h"

#include <catch2/catch.hpp>

#include <latch>
#include <thread>

#include "agent/loopback_group.h"
#include "wire/callable_name.h"
#include "wire/codec.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

using Side = CallCounts::Side;

std::string callOf(const std::string& function) {
  std::string payload;
  Writer(payload).putString(function);
  return payload;
}

/// worker0 calls worker1, both count.
struct CountingPair {
  explicit CountingPair(Messenger::RequestHandler serve, bool is_on = true, SendFaultPolicy faults = {})
      : caller(group[0], is_on), callee(group[1], is_on) {
    if (faults) inject = std::move(faults);
    group[0].observeCalls(caller);
    group[1].observeCalls(callee);
    group[1].on(Kind::kCppCall, Messenger::Where::kPool, std::move(serve));
    group.start();
  }
  void request(Message message, Messenger::ReplyHandler handler) {
    group[0].request(1, std::move(message), 20s, std::move(handler));
  }
  Result<Message> call(const std::string& function) {
    Pending pending;
    request({.kind = Kind::kCppCall, .payload = callOf(function)}, pending.handler());
    return pending.get();
  }

  SendFaultPolicy inject = [](const Message&) { return SendFault(); };
  LoopbackGroup group{{.size = 2, .send_faults = [this](const Message& message) { return inject(message); }}};
  CallMetrics caller, callee;

  ~CountingPair() {
    for (int id : {0, 1}) group[id].close();
  }
};

void answer(const Request& /*request*/, const Responder& responder) {
  responder.reply({.kind = Kind::kReply, .payload = "abc"});
}

CallCounts only(const CallMetrics& metrics) {
  const auto rows = metrics.snapshot();
  REQUIRE(rows.size() == 1);
  return rows.front();
}

}  // namespace

TEST_CASE("a bucket contains the latencies between its neighbours' ends") {
  using Histogram = LatencyHistogram;
  for (uint64_t ns : {0ul, 1023ul, 1024ul, 1151ul, 1152ul, 999'999ul, 1ul << 39, (1ul << 40) - 1}) {
    const auto bucket = Histogram::bucketOf(ns);
    CHECK(ns < Histogram::endOf(bucket));
    if (bucket > 0) CHECK(ns >= Histogram::endOf(bucket - 1));
  }
  CHECK(Histogram::bucketOf(1ul << 40) == Histogram::kBuckets - 1);
  CHECK(Histogram::bucketOf(~0ul) == Histogram::kBuckets - 1);
  for (size_t bucket = 1; bucket + 1 < Histogram::kBuckets; ++bucket) {
    CHECK(Histogram::endOf(bucket) > Histogram::endOf(bucket - 1));
    CHECK(Histogram::bucketOf(Histogram::endOf(bucket) - 1) == bucket);
  }
}

TEST_CASE("a quantile is right to one bucket") {
  LatencyHistogram histogram;
  CHECK(histogram.quantile(0.5) == 0);
  for (uint64_t us = 1; us <= 1000; ++us) histogram.add(LatencyHistogram::bucketOf(us * 1000), 1);
  CHECK(histogram.total() == 1000);
  CHECK(histogram.quantile(0.5) == Approx(500'000).epsilon(0.13));
  CHECK(histogram.quantile(0.99) == Approx(990'000).epsilon(0.13));
  CHECK(histogram.quantile(1) >= 1'000'000);
}

TEST_CASE("calls are counted by function, peer and side") {
  CountingPair pair([](const Request& request, const Responder& responder) {
    if (callableName(request.message.kind, request.message.payload) == "fail") {
      return responder.fail(Error(ErrorCode::kUserException, "no"));
    }
    answer(request, responder);
  });
  for (int i = 0; i < 3; ++i) REQUIRE(pair.call("train"));
  REQUIRE_FALSE(pair.call("fail"));
  for (const auto* metrics : {&pair.caller, &pair.callee}) {
    const bool is_caller = metrics == &pair.caller;
    const auto rows = metrics->snapshot();
    REQUIRE(rows.size() == 2);
    CHECK(rows[0].function == "train");
    CHECK(rows[0].peer == (is_caller ? "worker1" : "worker0"));
    CHECK(rows[0].side == (is_caller ? Side::kOut : Side::kIn));
    CHECK(rows[0].calls == 3);
    CHECK(rows[0].in_flight == 0);
    CHECK(rows[0].errors.empty());
    CHECK(rows[0].request_bytes == 3 * callOf("train").size());
    CHECK(rows[0].reply_bytes == 9);
    CHECK(rows[0].latency.total() == 3);
    CHECK(rows[0].max_ns <= rows[0].total_ns);
    CHECK(rows[1].function == "fail");
    CHECK(rows[1].errors.size() == 1);
    CHECK(rows[1].errors.at(ErrorCode::kUserException) == 1);
  }
}

TEST_CASE("nothing is counted while metrics are off") {
  CountingPair pair(answer, /*is_on=*/false);
  REQUIRE(pair.call("train"));
  CHECK(pair.caller.snapshot().empty());
  pair.caller.enable(true);
  REQUIRE(pair.call("train"));
  pair.caller.enable(false);
  REQUIRE(pair.call("train"));
  CHECK(only(pair.caller).calls == 1);
  CHECK(pair.callee.snapshot().empty());
}

TEST_CASE("a call that has begun while metrics were on is counted when it ends") {
  std::latch is_running(1), may_end(1);
  CountingPair pair([&](const Request& request, const Responder& responder) {
    is_running.count_down();
    may_end.wait();
    answer(request, responder);
  });
  Pending pending;
  pair.request({.kind = Kind::kCppCall, .payload = callOf("slow")}, pending.handler());
  is_running.wait();
  CHECK(only(pair.caller).in_flight == 1);
  CHECK(only(pair.callee).in_flight == 1);
  CHECK(only(pair.callee).calls == 0);
  pair.caller.enable(false);
  pair.callee.enable(false);
  may_end.count_down();
  REQUIRE(pending.get());
  CHECK(only(pair.caller).in_flight == 0);
  CHECK(only(pair.caller).calls == 1);
  CHECK(only(pair.callee).in_flight == 0);
}

TEST_CASE("a call that is repeated counts once, with the time of all attempts") {
  std::atomic<int> attempts = 0;
  CountingPair pair(answer, /*is_on=*/true, [&](const Message& message) {
    SendFault fault;
    fault.fail = message.kind == Kind::kCppCall && ++attempts < 3;
    return fault;
  });
  auto repetition = std::make_shared<Repetition>();
  repetition->policy = {.retries = 5, .first_delay = 1ms, .max_delay = 2ms};
  Pending pending;
  pair.request({.kind = Kind::kCppCall, .payload = callOf("train"), .repetition = repetition}, pending.handler());
  REQUIRE(pending.get());
  CHECK(attempts == 3);
  for (const auto* metrics : {&pair.caller, &pair.callee}) {
    CHECK(only(*metrics).calls == 1);
    CHECK(only(*metrics).in_flight == 0);
    CHECK(only(*metrics).errors.empty());
  }
}

TEST_CASE("a request that is never answered counts as an error") {
  CountingPair pair([](const Request&, const Responder&) {});
  REQUIRE_FALSE(pair.call("forget"));
  CHECK(only(pair.callee).errors.size() == 1);
  CHECK(only(pair.caller).errors.size() == 1);
}

TEST_CASE("a peer that calls ever new names fills one row, and gets no more memory") {
  CountingPair pair(answer);
  for (size_t i = 0; i < CallMetrics::kMaxPairs + 10; ++i) REQUIRE(pair.call("f" + std::to_string(i)));
  REQUIRE(pair.call("f0"));
  const auto rows = pair.callee.snapshot();
  REQUIRE(rows.size() == CallMetrics::kMaxPairs + 1);
  CHECK(rows.front().calls == 2);
  CHECK(rows.back().function == CallMetrics::kOther);
  CHECK(rows.back().calls == 10);
}

TEST_CASE("names that are too long are cut, and payloads that are malformed count under their kind") {
  CountingPair pair(answer);
  REQUIRE(pair.call(std::string(1000, 'x')));
  Pending pending;
  pair.request({.kind = Kind::kCppCall, .payload = "bad"}, pending.handler());
  REQUIRE(pending.get());
  const auto rows = pair.callee.snapshot();
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].function.size() < 200);
  CHECK(rows[0].function.ends_with("..."));
  CHECK(rows[1].function == name(Kind::kCppCall));
}

TEST_CASE("counters of threads that have ended stay") {
  CountingPair pair(answer);
  for (int round = 0; round < 4; ++round) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int j = 0; j < 50; ++j) static_cast<void>(pair.call("f" + std::to_string(j % 3)));
      });
    }
    while (pair.caller.snapshot().empty()) std::this_thread::yield();  // beside the threads that count
    for (auto& thread : threads) thread.join();
  }
  uint64_t calls = 0;
  for (const auto& row : pair.caller.snapshot()) {
    calls += row.calls;
    CHECK(row.in_flight == 0);
    CHECK(row.latency.total() == row.calls);
  }
  CHECK(calls == 4 * 4 * 50);
}

TEST_CASE("threads outlive the nodes whose calls they have counted") {
  for (int i = 0; i < 3; ++i) {
    CountingPair pair(answer);
    REQUIRE(pair.call("train"));
    CHECK(only(pair.caller).calls == 1);
  }
}

TEST_CASE("a request that is answered on the loop is counted once, and one that is not, too") {
  for (const bool is_answered : {true, false}) {
    LoopbackGroup group({.size = 2});
    CallMetrics metrics(group[1], true);
    group[1].observeCalls(metrics);
    group[1].on(Kind::kAutogradGradients, Messenger::Where::kPool, answer);
    group[1].onLoopFirst(Kind::kAutogradGradients, [&](const Request& request, const Responder& responder) {
      if (is_answered) answer(request, responder);
      return is_answered;
    });
    group.start();
    Pending pending;
    group[0].request(1, {.kind = Kind::kAutogradGradients}, 20s, pending.handler());
    REQUIRE(pending.get());
    for (int id : {0, 1}) group[id].close();
    const auto row = only(metrics);
    CHECK(row.function == name(Kind::kAutogradGradients));
    CHECK(row.calls == 1);
    CHECK(row.in_flight == 0);
    CHECK(row.errors.empty());
    CHECK(row.reply_bytes == 3);
  }
}
