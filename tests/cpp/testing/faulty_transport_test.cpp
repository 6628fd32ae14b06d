// The faults that the faulty transport injects. The test moves the clock.

#include "testing/faulty_transport.h"

#include "testing/manual_timer.h"
#include "transport/transports_under_test.h"
#include "transport/witness.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

Frame callFrame(CallId call) {
  Message message;
  message.kind = Kind::kBuiltinCall;
  message.call = call;
  return encodeFrame(message);
}

CallId callOf(const Frame& frame) { return peekFrame(frame.head)->call; }

/// Injects the faults that a test sets for call ids.
struct Faulty {
  static inline std::map<CallId, Fault> faults;
  static inline ManualTimer* timer = nullptr;
  static inline std::vector<std::string> asked;  // only the test's thread sends

  Loopback inner;
  std::unique_ptr<Transport> make(Limits limits) {
    auto policy = [](const FrameInfo& frame, const std::string& peer_name) {
      asked.push_back(std::string(name(frame.kind)) + " to " + peer_name);
      return faults[frame.call];
    };
    return makeFaultyTransport(inner.make(limits), policy, *timer);
  }
};

struct Fixture {
  ManualTimer timer;
  Fixture() {
    Faulty::faults.clear();
    Faulty::asked.clear();
    Faulty::timer = &timer;
  }
};

}  // namespace

TEST_CASE_METHOD(Fixture, "the policy is called once for each frame, with its kind and its peer") {
  Pair<Faulty> pair;
  auto connection = pair.connect(pair.witness());
  pair.send(*connection, callFrame(1));
  pair.send(*pair.accepted().connection, callFrame(2));
  CHECK(Faulty::asked == std::vector<std::string>{"SCRIPT_CALL to bob", "SCRIPT_CALL to "});
}

TEST_CASE_METHOD(Fixture, "a failed frame is an error, and the connection stays open") {
  Faulty::faults[1].action = Fault::Action::kFail;
  Pair<Faulty> pair;
  auto connection = pair.connect(pair.witness());
  const auto error = pair.outcome(pair.send(*connection, callFrame(1)));
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kWorkerLost);
  CHECK_FALSE(pair.outcome(pair.send(*connection, callFrame(2))));
  CHECK(callOf(pair.accepted().witness->takeFrame()) == 2);
}

TEST_CASE_METHOD(Fixture, "a dropped frame completes as if sent and never arrives") {
  Faulty::faults[1].action = Fault::Action::kDrop;
  Pair<Faulty> pair;
  auto connection = pair.connect(pair.witness());
  CHECK_FALSE(pair.outcome(pair.send(*connection, callFrame(1))));
  pair.send(*connection, callFrame(2));
  CHECK(callOf(pair.accepted().witness->takeFrame()) == 2);
}

TEST_CASE_METHOD(Fixture, "a repeated frame arrives twice and completes once") {
  Faulty::faults[1].action = Fault::Action::kRepeat;
  Pair<Faulty> pair;
  auto connection = pair.connect(pair.witness());
  CHECK_FALSE(pair.outcome(pair.send(*connection, callFrame(1))));
  CHECK(callOf(pair.accepted().witness->takeFrame()) == 1);
  CHECK(callOf(pair.accepted().witness->takeFrame()) == 1);
}

TEST_CASE_METHOD(Fixture, "a delayed frame is overtaken, and arrives after its delay") {
  Faulty::faults[1].delay = 10s;
  Pair<Faulty> pair;
  auto connection = pair.connect(pair.witness());
  auto sent = pair.send(*connection, callFrame(1));
  pair.send(*connection, callFrame(2));
  CHECK(callOf(pair.accepted().witness->takeFrame()) == 2);
  timer.advance(9s);
  CHECK_FALSE(sent->done);
  timer.advance(1s);
  CHECK_FALSE(pair.outcome(sent));
  CHECK(callOf(pair.accepted().witness->takeFrame()) == 1);
}

TEST_CASE_METHOD(Fixture, "closing fails the frames that are still delayed, which never arrive then") {
  Faulty::faults[1].delay = 10s;
  Faulty::faults[2] = {Fault::Action::kDrop, 10s};
  Pair<Faulty> pair;
  auto connection = pair.connect(pair.witness());
  auto first = pair.send(*connection, callFrame(1)), second = pair.send(*connection, callFrame(2));
  pair.close();
  for (auto& sent : {first, second}) {
    REQUIRE(sent->done);
    CHECK(sent->error);
  }
  timer.advance(20s);
  CHECK(pair.outcome(pair.send(*connection, callFrame(1))));
}

TEST_CASE_METHOD(Fixture, "a delayed frame whose connection has ended fails after its delay") {
  Faulty::faults[1].delay = 10s;
  Pair<Faulty> pair;
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  auto sent = pair.send(*connection, callFrame(1));
  connection->close();
  alice->awaitClosed();
  timer.advance(10s);
  CHECK(pair.outcome(sent));
}
