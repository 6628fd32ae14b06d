// Calls of user functions that arrive before a worker is ready for them: Note [First calls].

#include <catch2/catch.hpp>

#include <atomic>

#include "agent/loopback_group.h"
#include "testing/manual_timer.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

/// Two workers; worker1 keeps calls, and answers those that run.
class KeepingGroup {
 public:
  explicit KeepingGroup(LoopbackGroup::Options options = {}) : group_(std::move(options)) {
    for (const auto kind : {Kind::kCppCall, Kind::kCppRemote, Kind::kBuiltinCall}) {
      group_[1].on(kind, Messenger::Where::kPool, [this](const Request&, const Responder& responder) {
        ++served_;
        responder.reply({.kind = Kind::kReply});
      });
    }
    hold_ = group_[1].keepCalls();
    group_.start();
  }

  void call(int from, Kind kind, Pending& pending) { group_[from].request(1, message(kind), 10s, pending.handler()); }
  /// Waits until worker1 has read all that worker0 has sent so far: the link keeps the order of messages.
  void awaitArrival() {
    Pending pending;
    call(0, Kind::kBuiltinCall, pending);
    REQUIRE(pending.get().ok());
    --served_;
  }
  int served() const { return served_; }
  CallGate::Hold& hold() { return *hold_; }
  Agent& callee() { return group_[1]; }

 private:
  std::atomic<int> served_{0};
  LoopbackGroup group_;
  std::shared_ptr<CallGate::Hold> hold_;
};

}  // namespace

TEST_CASE("a call of a user function that arrives while the worker keeps calls runs when they are released") {
  const auto kind = GENERATE(Kind::kCppCall, Kind::kCppRemote);
  KeepingGroup group;
  Pending first, second;
  group.call(0, kind, first);
  group.call(0, kind, second);
  group.awaitArrival();
  CHECK(group.served() == 0);
  group.hold().release();
  CHECK(first.get().ok());
  CHECK(second.get().ok());
  CHECK(group.served() == 2);
}

TEST_CASE("calls run at once when they have been released, and a second release changes nothing") {
  KeepingGroup group;
  group.hold().release();
  group.hold().release();
  Pending pending;
  group.call(0, Kind::kCppCall, pending);
  CHECK(pending.get().ok());
}

TEST_CASE("calls are kept until each reason to keep them has been released") {
  KeepingGroup group;
  const auto second = group.callee().keepCalls();
  Pending pending;
  group.call(0, Kind::kCppCall, pending);
  group.hold().release();
  group.awaitArrival();
  CHECK(group.served() == 0);
  second->release();
  CHECK(pending.get().ok());
}

TEST_CASE("a call of a worker to itself runs while the worker keeps the calls of others") {
  KeepingGroup group;
  Pending pending;
  group.call(1, Kind::kCppCall, pending);
  CHECK(pending.get().ok());
}

TEST_CASE("calls that are released after a delay run when it has passed") {
  const auto timer = std::make_shared<ManualTimer>();
  KeepingGroup group({.timer = timer});
  Pending pending;
  group.call(0, Kind::kCppCall, pending);
  const auto second = group.callee().keepCalls();
  group.hold().release();
  group.callee().releaseAfter(5ms, second);
  timer->advance(4ms);
  group.awaitArrival();
  CHECK(group.served() == 0);
  timer->advance(1ms);
  CHECK(pending.get().ok());
}

TEST_CASE("a worker that ends answers the calls that it has kept") {
  KeepingGroup group;
  Pending pending;
  group.call(0, Kind::kCppCall, pending);
  group.awaitArrival();
  group.callee().beginEnd(kNoLimit);
  CHECK(pending.get().ok());
}
