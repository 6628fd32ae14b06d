// Workers that fall silent: who is asked for a sign of life, who is lost, and that idle ones are left alone.

#include <catch2/catch.hpp>

#include <latch>
#include <thread>

#include "agent/deadline.h"
#include "agent/loopback_group.h"
#include "testing/manual_timer.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

constexpr auto kCall = Kind::kCppCall;
constexpr auto kTimeout = 10s;
constexpr auto kLook = kTimeout / 5;

/// Worker 1 keeps calls, worker 2 answers them. PINGs and PONGs are counted; a mute worker's PONGs get lost.
struct Group {
  std::atomic<int> pings{0}, pongs{0};
  std::atomic<bool> mute{false};
  std::shared_ptr<ManualTimer> timer = std::make_shared<ManualTimer>();
  Mutex mutex;
  std::vector<Responder> held;
  std::latch arrived{1};
  std::atomic<bool> told{false};
  std::promise<WorkerInfo> lost;
  LoopbackGroup agents;

  explicit Group(std::shared_ptr<Timer> own_timer = nullptr)
      : agents({
            .size = 3,
            .timer = own_timer ? std::move(own_timer) : timer,
            .faults = [this](const FrameInfo& frame, const std::string&) -> Fault {
              if (frame.kind == Kind::kPing) ++pings;
              if (frame.kind != Kind::kPong) return {};
              ++pongs;
              return {mute ? Fault::Action::kDrop : Fault::Action::kDeliver};
            },
            .liveness = kTimeout,
        }) {
    agents[1].on(kCall, Messenger::Where::kPool, [this](const Request&, Responder responder) {
      {
        MutexLock lock(mutex);
        held.push_back(std::move(responder));
      }
      arrived.count_down();
    });
    agents[2].on(kCall, Messenger::Where::kLoop, [](const Request&, const Responder& responder) {
      responder.reply(message(Kind::kReply));
    });
    agents[0].onWorkerLost([this](const WorkerInfo& worker) {
      if (!told.exchange(true)) lost.set_value(worker);  // each attempt to reach it tells
    });
  }
  ~Group() { answerAll(); }

  void answerAll() {
    std::vector<Responder> all;
    {
      MutexLock lock(mutex);
      all.swap(held);
    }
    for (auto& responder : all) responder.reply(message(Kind::kReply));
  }

  /// One look, and what it brings about.
  void look() {
    const int before = pongs;
    const int asked = pings;
    timer->advance(kLook);
    if (pings == asked) return;
    while (pongs == before) std::this_thread::yield();
    Pending round_trip;  // through the same loop: the PONG has been there before
    agents[0].request(2, message(kCall), 0s, round_trip.handler());
    round_trip.get().take();
  }
};

}  // namespace

TEST_CASE("a silent worker is lost after the liveness time-out, whatever time its calls have") {
  Group group;
  group.mute = true;
  group.agents.start();
  Pending call;
  group.agents[0].request(1, message(kCall), 0s, call.handler());
  group.arrived.wait();
  for (int i = 0; i < 3; ++i) group.timer->advance(kLook);
  CHECK_FALSE(call.done());
  group.timer->advance(2 * kLook);
  const auto result = call.get();
  REQUIRE_FALSE(result.ok());
  CHECK(result.error().code() == ErrorCode::kWorkerLost);
  CHECK(result.error().worker() == "worker1");
  CHECK_THAT(result.error().text(), Catch::Contains("worker1 has not given a sign of life for 10 s"));
  CHECK(group.lost.get_future().get().name == "worker1");
}

TEST_CASE("a worker that works for long answers pings and is not lost") {
  Group group;
  group.agents.start();
  Pending call;
  group.agents[0].request(1, message(kCall), 0s, call.handler());
  group.arrived.wait();
  for (int i = 0; i < 20; ++i) group.look();
  CHECK(group.pongs >= 10);
  CHECK_FALSE(call.done());
  group.answerAll();
  CHECK(call.get().ok());
}

TEST_CASE("nobody is pinged, and nothing is timed, while nothing is awaited") {
  Group group;
  group.agents.start();
  Pending call;
  group.agents[0].request(2, message(kCall), 0s, call.handler());
  REQUIRE(call.get().ok());
  for (int i = 0; i < 5; ++i) group.timer->advance(kLook);
  CHECK(group.pings == 0);
  CHECK(group.timer->pending() == 0);
}

TEST_CASE("a worker is pinged for what others than calls await of it") {
  Group group;
  group.mute = true;
  std::atomic<bool> awaits{true};
  group.agents[0].addAwaited([&](std::set<WorkerId>& workers) {
    if (awaits) workers.insert(2);
  });
  group.agents.start();
  Pending call;
  group.agents[0].request(2, message(kCall), 0s, call.handler());
  REQUIRE(call.get().ok());
  for (int i = 0; i < 5; ++i) group.timer->advance(kLook);
  CHECK(group.lost.get_future().get().name == "worker2");
  awaits = false;
}

TEST_CASE("what must arrive is not tried again with a silent worker") {
  Group group;
  group.mute = true;
  group.agents[1].on(Kind::kRRefUserDelete, Messenger::Where::kPool, [&group](const Request&, Responder responder) {
    MutexLock lock(group.mutex);
    group.held.push_back(std::move(responder));
  });
  group.agents.start();
  Pending call;
  group.agents[0].request(1, message(kCall), 0s, call.handler());
  group.arrived.wait();
  for (int i = 0; i < 5; ++i) group.timer->advance(kLook);
  REQUIRE_FALSE(call.get().ok());
  Pending reliable;
  group.agents[0].requestReliably(1, message(Kind::kRRefUserDelete), reliable.handler());
  REQUIRE(reliable.done());
  CHECK(reliable.get().error().code() == ErrorCode::kWorkerLost);
}

TEST_CASE("who is waited for is found lost if it is gone, and not if it lives") {
  Group group{std::shared_ptr<Timer>(makeThreadTimer())};
  group.agents.start();
  group.agents[1].close();
  std::vector<WorkerId> lost;
  while (lost.empty()) lost = group.agents[0].lostAmong({1, 2});
  CHECK(lost == std::vector<WorkerId>{1});
}

TEST_CASE("a call's time bounds the calls that its function makes") {
  auto timer = std::make_shared<ManualTimer>();
  LoopbackGroup group({.timer = timer, .propagate_deadlines = true});
  std::promise<TimePoint> limit, inner_limit;
  group[0].on(kCall, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    inner_limit.set_value(currentDeadline());
    responder.reply(message(Kind::kReply));
  });
  group[1].on(kCall, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    limit.set_value(currentDeadline());
    group[1].request(
        0, message(kCall), 1h, [responder](Result<Message> reply) { responder.complete(std::move(reply)); });
  });
  group.start();
  Pending call;
  const auto start = timer->now();
  group[0].request(1, message(kCall), 3s, call.handler());
  CHECK(call.get().ok());
  CHECK(limit.get_future().get() == start + 3s);
  CHECK(inner_limit.get_future().get() == start + 3s);
  CHECK(currentDeadline() == kNever);
}
