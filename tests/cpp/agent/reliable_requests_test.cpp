// Requests that are sent until they are answered: their ids, their window, and their failures.

#include <catch2/catch.hpp>

#include <latch>

#include "agent/loopback_group.h"
#include "testing/manual_timer.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

constexpr auto kReliable = Kind::kRRefUserDelete;

/// Keeps the requests that arrive, until it is told to answer them and all later ones.
class Keeper {
 public:
  explicit Keeper(int expected) : arrived_(expected) {}
  Messenger::RequestHandler handler() {
    return [this](const Request& request, Responder responder) {
      bool is_open = false;
      {
        MutexLock lock(mutex_);
        is_open = is_open_;
        order_.push_back(request.message.payload);
        calls_.insert(request.message.call);
        if (!is_open) kept_.push_back(responder);
      }
      if (is_open) return responder.reply(message(Kind::kReply));
      arrived_.count_down();
    };
  }
  void awaitAll() { arrived_.wait(); }
  void answerAll() {
    std::vector<Responder> kept;
    {
      MutexLock lock(mutex_);
      is_open_ = true;
      kept.swap(kept_);
    }
    for (auto& responder : kept) responder.reply(message(Kind::kReply));
  }
  std::vector<std::string> order() {
    MutexLock lock(mutex_);
    return order_;
  }
  size_t callIds() {
    MutexLock lock(mutex_);
    return calls_.size();
  }

 private:
  std::latch arrived_;
  Mutex mutex_;
  bool is_open_ TORCHRPC_GUARDED_BY(mutex_) = false;
  std::vector<Responder> kept_ TORCHRPC_GUARDED_BY(mutex_);
  std::vector<std::string> order_ TORCHRPC_GUARDED_BY(mutex_);
  std::set<CallId> calls_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace

TEST_CASE("a reliable request keeps its call id, and a late answer completes it") {
  auto timer = std::make_shared<ManualTimer>();
  LoopbackGroup group({.timer = timer});
  constexpr int kAttempts = 3;
  Keeper keeper(kAttempts);
  group[1].on(kReliable, Messenger::Where::kLoop, keeper.handler());
  group.start();
  Pending request;
  group[0].requestReliably(1, message(kReliable), request.handler());
  for (int i = 0; i < 6; ++i) timer->advance(10s);  // sends it again after 20 s and after 60 s
  keeper.awaitAll();
  CHECK(keeper.callIds() == 1);
  CHECK_FALSE(request.done());
  keeper.answerAll();  // the first of the answers completes it
  CHECK(request.get().ok());
  CHECK(request.completions() == 1);
}

TEST_CASE("a reliable request is sent again if its frame has disappeared") {
  auto timer = std::make_shared<ManualTimer>();
  std::atomic<int> sends{0};
  auto policy = [&](const FrameInfo& frame, const std::string&) -> Fault {
    const bool drops = frame.kind == kReliable && sends++ == 0;
    return {drops ? Fault::Action::kDrop : Fault::Action::kDeliver};
  };
  LoopbackGroup group({.timer = timer, .faults = policy});
  group[1].on(kReliable, Messenger::Where::kLoop, [](const Request&, const Responder& responder) {
    responder.reply(message(Kind::kReply));
  });
  group.start();
  Pending request;
  group[0].requestReliably(1, message(kReliable), request.handler());
  CHECK(sends == 1);
  for (int i = 0; i < 4; ++i) timer->advance(10s);
  CHECK(request.get().ok());
  CHECK(sends == 2);
}

TEST_CASE("a peer that answers a reliable request with a time-out gets it again") {
  auto timer = std::make_shared<ManualTimer>();
  std::atomic<int> served{0};
  LoopbackGroup group({.timer = timer});
  group[1].on(kReliable, Messenger::Where::kLoop, [&](const Request&, const Responder& responder) {
    if (served++ == 0) return responder.fail(Error(ErrorCode::kTimeout, "no time"));
    responder.reply(message(Kind::kReply));
  });
  group.start();
  Pending request;
  group[0].requestReliably(1, message(kReliable), request.handler());
  while (timer->pending() < 2) std::this_thread::yield();  // the round and the next attempt
  CHECK_FALSE(request.done());
  timer->advance(10ms);
  CHECK(request.get().ok());
  CHECK(served == 2);
}

TEST_CASE("reliable requests beyond the window wait, and are sent in their order") {
  constexpr int kExtra = 100;
  const int total = static_cast<int>(kReliableWindow) + kExtra;
  LoopbackGroup group({});
  Keeper keeper(static_cast<int>(kReliableWindow));
  group[1].on(kReliable, Messenger::Where::kLoop, keeper.handler());
  group.start();
  std::vector<Pending> requests(total);
  for (int i = 0; i < total; ++i) {
    group[0].requestReliably(1, message(kReliable, std::to_string(i)), requests[i].handler());
  }
  keeper.awaitAll();
  CHECK(group[0].metrics().at("agent.num_pending_calls") == std::to_string(kReliableWindow));
  keeper.answerAll();
  for (auto& request : requests) CHECK(request.get().ok());
  const auto order = keeper.order();
  REQUIRE(order.size() == static_cast<size_t>(total));
  for (int i = 0; i < total; ++i) CHECK(order.at(i) == std::to_string(i));
}

TEST_CASE("reliable requests that wait fail when their worker is lost, and when this one shuts down") {
  const int total = static_cast<int>(kReliableWindow) + 10;
  const bool is_lost = GENERATE(true, false);
  LoopbackGroup group({});
  Keeper keeper(static_cast<int>(kReliableWindow));
  group[1].on(kReliable, Messenger::Where::kLoop, keeper.handler());
  group.start();
  std::vector<Pending> requests(total);
  for (auto& request : requests) group[0].requestReliably(1, message(kReliable), request.handler());
  keeper.awaitAll();
  group[is_lost ? 1 : 0].close();
  for (auto& request : requests) {
    const auto error = request.get().error();
    CHECK(error.code() == (is_lost ? ErrorCode::kWorkerLost : ErrorCode::kShutdown));
    CHECK_THAT(error.text(), Catch::Contains(is_lost ? "worker1" : "RPC is shutting down on worker0"));
    CHECK(request.completions() == 1);
  }
  keeper.answerAll();
}

TEST_CASE("a peer that answers that another worker is lost does not fail the requests that wait") {
  auto timer = std::make_shared<ManualTimer>();
  const int total = static_cast<int>(kReliableWindow) + 1;
  LoopbackGroup group({.timer = timer});
  group[1].on(kReliable, Messenger::Where::kLoop, [](const Request& request, const Responder& responder) {
    if (request.message.payload.empty()) return responder.reply(message(Kind::kReply));
    responder.fail(Error(ErrorCode::kWorkerLost, "worker7 is lost", "worker7"));
  });
  group.start();
  std::vector<Pending> requests(total);
  for (int i = 0; i < total; ++i) {
    group[0].requestReliably(1, message(kReliable, i + 1 < total ? "x" : ""), requests[i].handler());
  }
  while (!requests.back().done() || !requests.front().done()) timer->advance(10ms);
  CHECK(requests.back().get().ok());
  CHECK(requests.front().get().error().code() == ErrorCode::kWorkerLost);
}
