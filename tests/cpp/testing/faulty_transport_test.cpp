// What the faulty transport does to frames; time is the test's.

#include "testing/faulty_transport.h"

#include "testing/manual_timer.h"
#include "transport/kinds.h"
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

/// Its policy is the test's, by call id.
struct Faulty {
  static inline std::map<CallId, Fault> faults;
  static inline ManualTimer* timer = nullptr;
  static inline std::vector<std::string> asked;  // on the test's thread

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

TEST_CASE_METHOD(Fixture, "the policy is asked once for each frame, with its kind and its peer") {
  Pair<Faulty> pair;
  auto connection = pair.connect(pair.witness());
  pair.send(*connection, callFrame(1));
  pair.send(*pair.accepted().connection, callFrame(2));
  CHECK(Faulty::asked == std::vector<std::string>{"SCRIPT_CALL to bob", "SCRIPT_CALL to "});
}

TEST_CASE_METHOD(Fixture, "a frame that is failed is an error and the connection stays") {
  Faulty::faults[1].action = Fault::Action::kFail;
  Pair<Faulty> pair;
  auto connection = pair.connect(pair.witness());
  const auto error = pair.outcome(pair.send(*connection, callFrame(1)));
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kWorkerLost);
  CHECK_FALSE(pair.outcome(pair.send(*connection, callFrame(2))));
  CHECK(callOf(pair.accepted().witness->takeFrame()) == 2);
}

TEST_CASE_METHOD(Fixture, "a frame that is dropped looks sent and never arrives") {
  Faulty::faults[1].action = Fault::Action::kDrop;
  Pair<Faulty> pair;
  auto connection = pair.connect(pair.witness());
  CHECK_FALSE(pair.outcome(pair.send(*connection, callFrame(1))));
  pair.send(*connection, callFrame(2));
  CHECK(callOf(pair.accepted().witness->takeFrame()) == 2);
}

TEST_CASE_METHOD(Fixture, "a frame that is repeated arrives twice and completes once") {
  Faulty::faults[1].action = Fault::Action::kRepeat;
  Pair<Faulty> pair;
  auto connection = pair.connect(pair.witness());
  CHECK_FALSE(pair.outcome(pair.send(*connection, callFrame(1))));
  CHECK(callOf(pair.accepted().witness->takeFrame()) == 1);
  CHECK(callOf(pair.accepted().witness->takeFrame()) == 1);
}

TEST_CASE_METHOD(Fixture, "a frame that is delayed is overtaken, and arrives when its time has come") {
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

TEST_CASE_METHOD(Fixture, "closing fails the frames that are still delayed, and time brings them no more") {
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

TEST_CASE_METHOD(Fixture, "a delayed frame whose connection has ended fails when its time has come") {
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
