// Silent workers: which are pinged, which are lost, and that workers without outstanding requests are left alone.

#include <catch2/catch.hpp>

#include <latch>
#include <thread>

#include "agent/loopback_group.h"
#include "calls/current_call.h"
#include "testing/manual_timer.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

constexpr auto kTimeout = 10s;
constexpr auto kRound = kTimeout / 5;

/// Worker 1 holds its calls, worker 2 answers them. Counts PINGs and PONGs; drops the PONGs while `drop_pongs`.
struct Group {
  std::atomic<int> pings{0}, pongs{0};
  std::atomic<bool> drop_pongs{false};
  std::shared_ptr<ManualTimer> timer = std::make_shared<ManualTimer>();
  Mutex mutex;
  std::vector<Responder> held TORCHRPC_GUARDED_BY(mutex);
  std::latch arrived{1};
  std::atomic<bool> loss_reported{false};
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
              return {drop_pongs ? Fault::Action::kDrop : Fault::Action::kDeliver};
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
      if (!loss_reported.exchange(true)) lost.set_value(worker);  // each attempt to reach it reports it
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

  /// One poll round, and the pings and pongs that it causes.
  void runRound() {
    const int pongs_before = pongs;
    const int pings_before = pings;
    timer->advance(kRound);
    if (pings == pings_before) return;
    while (pongs == pongs_before) std::this_thread::yield();
    Pending round_trip;  // through the same loop: when it ends, the PONG has been handled
    agents[0].request(2, message(kCall), kNoLimit, round_trip.handler());
    round_trip.get().take();
  }
};

}  // namespace

TEST_CASE("a silent worker is lost after the liveness time-out, whatever the time-outs of its calls") {
  Group group;
  group.drop_pongs = true;
  group.agents.start();
  Pending call;
  group.agents[0].request(1, message(kCall), kNoLimit, call.handler());
  group.arrived.wait();
  for (int i = 0; i < 3; ++i) group.timer->advance(kRound);
  CHECK_FALSE(call.done());
  group.timer->advance(2 * kRound);
  const auto result = call.get();
  REQUIRE_FALSE(result.ok());
  CHECK(result.error().code() == ErrorCode::kWorkerLost);
  CHECK(result.error().worker() == "worker1");
  CHECK_THAT(result.error().text(), Catch::Contains("worker1 has been silent for 10 s"));
  CHECK(group.lost.get_future().get().name == "worker1");
}

namespace {

/// Over loopback; its loop reads nothing while `is_busy`.
class BusyTransport final : public Transport {
 public:
  BusyTransport(std::unique_ptr<Transport> inner, std::atomic<bool>& is_busy)
      : inner_(std::move(inner)), is_busy_(is_busy) {}
  std::string listen(Acceptor acceptor) override { return inner_->listen(std::move(acceptor)); }
  std::shared_ptr<Connection> connect(
      const std::string& address, const std::string& peer, std::shared_ptr<ConnectionHandler> handler) override {
    return inner_->connect(address, peer, std::move(handler));
  }
  void close() override { inner_->close(); }
  bool inLoop() const override { return inner_->inLoop(); }
  std::string describe() const override { return "busy"; }
  void afterReading(std::function<void()> done) override {
    if (!is_busy_) return done();
    MutexLock lock(mutex_);
    waiting_ = std::move(done);
  }
  void goOn() {
    is_busy_ = false;
    std::function<void()> done;
    {
      MutexLock lock(mutex_);
      done.swap(waiting_);
    }
    if (done) done();
  }

 private:
  const std::unique_ptr<Transport> inner_;
  std::atomic<bool>& is_busy_;
  Mutex mutex_;
  std::function<void()> waiting_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace

TEST_CASE("while this worker's loop has not read what has arrived, no other worker is taken for silent") {
  std::atomic<bool> is_busy{true};
  std::vector<BusyTransport*> transports;
  const auto network = makeLoopbackNetwork();
  const auto timer = std::make_shared<ManualTimer>();
  LoopbackGroup agents({.timer = timer, .liveness = kTimeout, .transport = [&]() -> std::unique_ptr<Transport> {
                          auto transport = std::make_unique<BusyTransport>(makeLoopbackTransport(network), is_busy);
                          transports.push_back(transport.get());
                          return transport;
                        }});
  std::promise<Responder> held;
  agents[1].on(
      kCall, Messenger::Where::kPool, [&](const Request&, const Responder& responder) { held.set_value(responder); });
  agents.start();
  Pending call;
  agents[0].request(1, message(kCall), kNoLimit, call.handler());
  const auto responder = held.get_future().get();
  timer->advance(20 * kTimeout);
  CHECK_FALSE(call.done());
  transports[0]->goOn();
  responder.reply(message(Kind::kReply));
  CHECK(call.get().ok());
}

TEST_CASE("a worker that is busy for long answers pings and is not lost") {
  Group group;
  group.agents.start();
  Pending call;
  group.agents[0].request(1, message(kCall), kNoLimit, call.handler());
  group.arrived.wait();
  for (int i = 0; i < 20; ++i) group.runRound();
  CHECK(group.pongs >= 10);
  CHECK_FALSE(call.done());
  group.answerAll();
  CHECK(call.get().ok());
}

TEST_CASE("without outstanding requests there are neither pings nor a timer") {
  Group group;
  group.agents.start();
  Pending call;
  group.agents[0].request(2, message(kCall), kNoLimit, call.handler());
  REQUIRE(call.get().ok());
  for (int i = 0; i < 5; ++i) group.timer->advance(kRound);
  CHECK(group.pings == 0);
  CHECK(group.timer->pending() == 0);
}

TEST_CASE("a worker is pinged while another source than the call table names it") {
  Group group;
  group.drop_pongs = true;
  std::atomic<bool> is_outstanding{true};
  group.agents[0].addOutstanding([&](std::set<WorkerId>& workers) {
    if (is_outstanding) workers.insert(2);
  });
  group.agents.start();
  Pending call;
  group.agents[0].request(2, message(kCall), kNoLimit, call.handler());
  REQUIRE(call.get().ok());
  for (int i = 0; i < 5; ++i) group.timer->advance(kRound);
  CHECK(group.lost.get_future().get().name == "worker2");
  is_outstanding = false;
}

TEST_CASE("a worker that has only served requests pings the caller that a source names") {
  Group group;
  group.drop_pongs = true;
  std::promise<WorkerInfo> lost;
  std::atomic<bool> is_named{true};
  group.agents[2].addOutstanding([&](std::set<WorkerId>& workers) {
    if (is_named) workers.insert(0);
  });
  group.agents[2].onWorkerLost([&](const WorkerInfo& worker) {
    if (is_named.exchange(false)) lost.set_value(worker);
  });
  group.agents.start();
  Pending call;
  group.agents[0].request(2, message(kCall), kNoLimit, call.handler());
  REQUIRE(call.get().ok());
  for (int i = 0; i < 5; ++i) group.timer->advance(kRound);
  auto worker = lost.get_future();
  REQUIRE(worker.wait_for(20s) == std::future_status::ready);
  CHECK(worker.get().name == "worker0");
}

TEST_CASE("a reliable request is not sent to a silent worker again") {
  Group group;
  group.drop_pongs = true;
  group.agents[1].on(Kind::kRRefUserDelete, Messenger::Where::kPool, [&group](const Request&, Responder responder) {
    MutexLock lock(group.mutex);
    group.held.push_back(std::move(responder));
  });
  group.agents.start();
  Pending call;
  group.agents[0].request(1, message(kCall), kNoLimit, call.handler());
  group.arrived.wait();
  for (int i = 0; i < 5; ++i) group.timer->advance(kRound);
  REQUIRE_FALSE(call.get().ok());
  Pending reliable;
  group.agents[0].requestReliably(1, message(Kind::kRRefUserDelete), reliable.handler());
  REQUIRE(reliable.done());
  CHECK(reliable.get().error().code() == ErrorCode::kWorkerLost);
}

TEST_CASE("lostAmong() finds workers that have ended, not those that are alive") {
  Group group{std::shared_ptr<Timer>(makeThreadTimer())};
  group.agents.start();
  group.agents[1].close();
  std::vector<WorkerId> lost;
  while (lost.empty()) lost = group.agents[0].lostAmong({1, 2});
  CHECK(lost == std::vector<WorkerId>{1});
}

TEST_CASE("the deadline of a call bounds the calls that its function makes") {
  auto timer = std::make_shared<ManualTimer>();
  LoopbackGroup group({.timer = timer, .propagate_deadlines = true});
  std::promise<TimePoint> deadline, inner_deadline;
  group[0].on(kCall, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    inner_deadline.set_value(currentDeadline());
    responder.reply(message(Kind::kReply));
  });
  group[1].on(kCall, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    deadline.set_value(currentDeadline());
    group[1].request(
        0, message(kCall), 1h, [responder](Result<Message> reply) { responder.complete(std::move(reply)); });
  });
  group.start();
  Pending call;
  const auto start = timer->now();
  group[0].request(1, message(kCall), 3s, call.handler());
  CHECK(call.get().ok());
  CHECK(deadline.get_future().get() == start + 3s);
  CHECK(inner_deadline.get_future().get() == start + 3s);
  CHECK(currentDeadline() == kNever);
}
