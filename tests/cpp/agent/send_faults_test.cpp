// Faults that are injected into the requests of an agent.

#include <catch2/catch.hpp>

#include "agent/loopback_group.h"
#include "testing/manual_timer.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

constexpr auto kPythonCall = Kind::kPythonCall;

/// A group whose worker0 has faults and whose workers answer calls; counts them.
struct FaultyGroup {
  explicit FaultyGroup(SendFaultPolicy faults)
      : timer(std::make_shared<ManualTimer>()), group({.timer = timer, .send_faults = std::move(faults)}) {
    for (int id : {0, 1}) {
      for (auto kind : {kPythonCall, Kind::kRRefUserDelete}) {
        group[id].on(kind, Messenger::Where::kLoop, [this](const Request&, const Responder& responder) {
          ++served;
          responder.reply(message(Kind::kReply));
        });
      }
    }
    group.start();
  }

  Result<Message> call(WorkerId to, std::string payload = {}) {
    Pending pending;
    group[0].request(to, message(kPythonCall, std::move(payload)), kNoLimit, pending.handler());
    return pending.get();
  }

  std::shared_ptr<ManualTimer> timer;
  std::atomic<int> served{0};
  LoopbackGroup group;
};

}  // namespace

TEST_CASE("an injected fault fails a request as often as configured, then the request is sent") {
  const WorkerId to = GENERATE(0, 1);
  FaultyGroup faulty(makeSendFaults({"PYTHON_CALL"}, 2, {}));
  for (int i = 0; i < 2; ++i) {
    const auto result = faulty.call(to, "the same");
    REQUIRE_FALSE(result.ok());
    CHECK(result.error().code() == ErrorCode::kWorkerLost);
    CHECK_THAT(result.error().text(), Catch::Contains("injected"));
  }
  CHECK_FALSE(faulty.call(to, "another").ok());
  CHECK(faulty.served == 0);
  CHECK(faulty.call(to, "the same").ok());
  CHECK(faulty.served == 1);
}

TEST_CASE("requests of kinds without a fault are sent") {
  FaultyGroup faulty(makeSendFaults({"SCRIPT_CALL"}, 100, {{"CPP_CALL", 100}}));
  CHECK(faulty.call(1).ok());
}

TEST_CASE("a reliable request is sent again until its faults are used up") {
  FaultyGroup faulty(makeSendFaults({"RREF_USER_DELETE"}, 3, {}));
  Pending pending;
  faulty.group[0].requestReliably(1, message(Kind::kRRefUserDelete, "x"), pending.handler());
  for (const auto pause : {10ms, 20ms, 40ms}) {  // the agent's: a longer step would cause several attempts
    CHECK_FALSE(pending.done());
    faulty.timer->advance(pause);
  }
  CHECK(pending.get().ok());
  CHECK(faulty.served == 1);
}

TEST_CASE("a delayed call can time out before it is sent, and is served all the same") {
  const WorkerId to = GENERATE(0, 1);
  FaultyGroup faulty(makeSendFaults({}, 0, {{"PYTHON_CALL", 1.5}}));
  Pending brief, patient;
  faulty.group[0].request(to, message(kPythonCall), 1s, brief.handler());
  faulty.group[0].request(to, message(kPythonCall), 2s, patient.handler());
  faulty.timer->advance(1s);
  const auto result = brief.get();
  REQUIRE_FALSE(result.ok());
  CHECK(result.error().code() == ErrorCode::kTimeout);
  CHECK(faulty.served == 0);
  faulty.timer->advance(500ms);
  CHECK(patient.get().ok());
  CHECK(faulty.served == 2);
  CHECK(brief.completions() == 1);
}

TEST_CASE("an agent that closes with delayed calls completes them") {
  FaultyGroup faulty(makeSendFaults({}, 0, {{"PYTHON_CALL", 1}}));
  Pending pending;
  faulty.group[0].request(1, message(kPythonCall), kNoLimit, pending.handler());
  faulty.group[0].close();
  CHECK(pending.get().error().code() == ErrorCode::kShutdown);
  CHECK(faulty.served == 0);
}

TEST_CASE("faults of unknown kinds, and negative numbers, are refused") {
  CHECK_THROWS_WITH(makeSendFaults({"PYTHON_CALLS"}, 1, {}), Catch::Contains("PYTHON_CALLS"));
  CHECK_THROWS_WITH(makeSendFaults({}, 1, {{"", 1}}), Catch::Contains("no kind"));
  CHECK_THROWS_AS(makeSendFaults({}, -1, {}), Error);
  CHECK_THROWS_AS(makeSendFaults({}, 0, {{"PYTHON_CALL", -1.0}}), Error);
}
