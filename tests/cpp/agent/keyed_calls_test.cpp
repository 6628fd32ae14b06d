// What a callee keeps of the calls that may arrive again: windows, bounds, and the numbers of calls without keys.

#include "calls/keyed_calls.h"

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include <optional>

#include "testing/manual_timer.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

/// A callee's table, and calls that arrive there.
struct Callee {
  explicit Callee(KeyedCalls::Options options = {}) : calls(withName(std::move(options)), timer) {}

  static KeyedCalls::Options withName(KeyedCalls::Options options) {
    options.self = "callee";
    options.incarnation = 5;
    return options;
  }

  struct Arrival {
    std::optional<Responder> run;  ///< set: the function runs
    std::shared_ptr<std::optional<Result<Message>>> answer = std::make_shared<std::optional<Result<Message>>>();
    bool runs() const { return run.has_value(); }
    std::string payload() const { return answer->value().value().payload; }
    ErrorCode code() const { return answer->value().error().code(); }
  };
  Arrival arrive(const RepeatableHeader& header, const std::string& from = "caller", uint64_t incarnation = 1) {
    Arrival arrival;
    const Responder responder(
        [answer = arrival.answer](Result<Message> result) { answer->emplace(std::move(result)); });
    const Request request{.from = {{from, 0}, incarnation}, .message = {.kind = Kind::kCppCall}};
    arrival.run = calls.begin(request, header, responder);
    return arrival;
  }
  /// A call that runs and is answered.
  void run(const RepeatableHeader& header, std::string payload = "answer", const std::string& from = "caller") {
    auto arrival = arrive(header, from);
    REQUIRE(arrival.runs());
    arrival.run->reply({.kind = Kind::kReply, .payload = std::move(payload)});
    REQUIRE(*arrival.answer);
  }

  ManualTimer timer;
  KeyedCalls calls;
};

RepeatableHeader keyed(std::string key) { return {.key = std::move(key), .digest = 1}; }
RepeatableHeader numbered(uint64_t number, uint64_t oldest) { return {.number = number, .oldest = oldest}; }

}  // namespace

TEST_CASE("a key is remembered for the window after its answer, and no longer") {
  Callee callee({.window = 600s});
  auto first = callee.arrive(keyed("a"));
  REQUIRE(first.runs());
  callee.timer.advance(10000s);  // it runs for long
  CHECK_FALSE(callee.arrive(keyed("a")).runs());
  first.run->reply({.kind = Kind::kReply, .payload = "answer"});
  callee.timer.advance(599s);
  CHECK(callee.arrive(keyed("a")).payload() == "answer");
  callee.timer.advance(2s);
  CHECK(callee.arrive(keyed("a")).runs());
}

TEST_CASE("keys beyond the bound are refused, and none is forgotten for them") {
  Callee callee({.window = 600s, .max_calls = 10});
  for (int i = 0; i < 10; ++i) callee.run(keyed(std::to_string(i)));
  CHECK(callee.arrive(keyed("more")).code() == ErrorCode::kQuotaExceeded);
  for (int i = 0; i < 10; ++i) CHECK(callee.arrive(keyed(std::to_string(i))).payload() == "answer");
  CHECK(callee.arrive(keyed("more"), "other").runs());  // each caller has its own
  callee.timer.advance(700s);
  CHECK(callee.arrive(keyed("more")).runs());
  CHECK(callee.calls.counts().calls == 1);
}

TEST_CASE("answers are dropped when there is no room, and their calls do not run again") {
  Callee callee({.max_reply_bytes = 1000});
  for (int i = 0; i < 20; ++i) {
    callee.run(keyed(std::to_string(i)), std::string(100, 'x'));
    CHECK(callee.calls.counts().reply_bytes <= 1000);
  }
  callee.run(keyed("small"), "y", "other");
  CHECK(callee.arrive(keyed("19")).payload().size() == 100);
  const auto dropped = callee.arrive(keyed("0"));
  CHECK_FALSE(dropped.runs());
  CHECK(dropped.code() == ErrorCode::kInvalidArgument);
  CHECK_THAT(dropped.answer->value().error().text(), Catch::Contains("no room for more results"));
  for (int i = 20; i < 40; ++i) callee.run(keyed(std::to_string(i)), std::string(100, 'x'));
  CHECK(callee.arrive(keyed("small"), "other").payload() == "y");  // another caller's large ones do not displace it

  callee.run(keyed("huge"), std::string(10000, 'x'));
  const auto huge = callee.arrive(keyed("huge"));
  CHECK_FALSE(huge.runs());
  CHECK_THAT(huge.answer->value().error().text(), Catch::Contains("too large"));
  CHECK(callee.calls.counts().reply_bytes <= 1000);
}

TEST_CASE("an answer with RRefs is not sent again") {
  Callee callee;
  auto first = callee.arrive(keyed("a"));
  auto waiting = callee.arrive(keyed("a"));
  Message reply{.kind = Kind::kReply};
  reply.headers.push_back({HeaderKind::kRRefForks, "fork"});
  first.run->reply(Message(reply));
  CHECK(first.answer->value().ok());
  CHECK(waiting.code() == ErrorCode::kInvalidArgument);
  CHECK_THAT(callee.arrive(keyed("a")).answer->value().error().text(), Catch::Contains("RRefs"));
}

TEST_CASE("calls without keys are dropped as soon as their caller has ended them") {
  Callee callee;
  for (uint64_t number = 1; number <= 1000; ++number) {
    callee.run(numbered(number, number));
    CHECK(callee.calls.counts().calls == 1);
  }
  CHECK(callee.arrive(numbered(1000, 1000)).payload() == "answer");
  // A copy of an earlier one has been on its way for long: nobody waits for it.
  const auto late = callee.arrive(numbered(999, 998));
  CHECK_FALSE(late.runs());
  CHECK(late.code() == ErrorCode::kProtocol);
  callee.run(numbered(1002, 1001));
  callee.run(numbered(1001, 1001));  // in any order
  CHECK(callee.calls.counts().calls == 2);
}

TEST_CASE("a call that its caller has ended while it ran is answered and forgotten") {
  Callee callee;
  auto first = callee.arrive(numbered(1, 1));
  callee.run(numbered(2, 2));
  first.run->reply({.kind = Kind::kReply, .payload = "late"});
  CHECK(first.payload() == "late");
  CHECK(callee.calls.counts().calls == 1);
}

TEST_CASE("a caller that was started again begins with new numbers, and keeps its keys") {
  Callee callee;
  callee.run(keyed("a"));
  callee.run(numbered(1, 1));
  const auto again = callee.arrive(numbered(1, 1), "caller", 2);
  CHECK(again.runs());
  CHECK(callee.arrive(keyed("a"), "caller", 2).payload() == "answer");
  CHECK(callee.arrive(numbered(3, 1), "caller", 1).code() == ErrorCode::kProtocol);  // of the earlier one
}

TEST_CASE("a callee that was started again runs nothing that the earlier one may have run") {
  Callee callee;
  auto header = keyed("a");
  header.incarnation = 4;
  const auto refused = callee.arrive(header);
  CHECK_FALSE(refused.runs());
  CHECK(refused.code() == ErrorCode::kWorkerLost);
  header.incarnation = 5;
  CHECK(callee.arrive(header).runs());
}

TEST_CASE("repetitions that wait for one answer are bounded") {
  Callee callee({.max_waiting = 3});
  auto first = callee.arrive(keyed("a"));
  std::vector<Callee::Arrival> waiting;
  for (int i = 0; i < 3; ++i) waiting.push_back(callee.arrive(keyed("a")));
  CHECK(callee.arrive(keyed("a")).code() == ErrorCode::kQuotaExceeded);
  first.run->reply({.kind = Kind::kReply, .payload = "answer"});
  for (const auto& each : waiting) CHECK(each.payload() == "answer");
}

TEST_CASE("a function that is dropped without an answer does not run again") {
  Callee callee;
  auto first = callee.arrive(keyed("a"));
  auto waiting = callee.arrive(keyed("a"));
  first.run.reset();
  CHECK(first.code() == ErrorCode::kShutdown);
  CHECK(waiting.code() == ErrorCode::kShutdown);
  CHECK_FALSE(callee.arrive(keyed("a")).runs());
}

TEST_CASE("values with a key are found while somebody holds them") {
  Callee callee;
  const Request request{.from = {{"caller", 0}, 1}, .message = {.kind = Kind::kCppRemote}};
  auto value = std::make_shared<int>(7);
  CHECK(callee.calls.beginValue(request, keyed("a"), value) == nullptr);
  auto second = std::make_shared<int>(0);
  CHECK(callee.calls.beginValue(request, keyed("a"), second) == value);
  value.reset();
  auto third = std::make_shared<int>(0);
  CHECK(callee.calls.beginValue(request, keyed("a"), third) == second);  // which has the value now
  second.reset();
  third.reset();
  CHECK_THROWS_AS(callee.calls.beginValue(request, keyed("a"), std::make_shared<int>(0)), Error);
  CHECK(callee.arrive(keyed("a")).code() == ErrorCode::kInvalidArgument);  // a call is not a remote call
}
