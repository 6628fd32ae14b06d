// The end of an agent that serves calls: which are answered, which are refused, and what its peers see.

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include <latch>
#include <thread>

#include "agent/held_requests.h"
#include "agent/loopback_group.h"
#include "transport/native/transport.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

Error failureOf(Pending& pending) {
  auto result = pending.get();
  REQUIRE_FALSE(result.ok());
  return result.error();
}

std::unique_ptr<Transport> nativeTransport(bool within_host) {
  native::Options options;
  options.host = "127.0.0.1";
  options.unix_sockets = within_host;
  return native::makeTransport(std::move(options));
}

}  // namespace

TEST_CASE("a worker that ends answers the calls that it serves and refuses others with its name") {
  LoopbackGroup group({});
  HeldRequests held(1);
  group[1].on(kCall, Messenger::Where::kPool, held.handler());
  group.start();
  Pending served, refused;
  group[0].request(1, message(kCall), kNoLimit, served.handler());
  held.awaitAll();
  CHECK_FALSE(group[1].drain(0ms));
  group[0].request(1, message(kCall), kNoLimit, refused.handler());
  const auto error = failureOf(refused);
  CHECK(error.code() == ErrorCode::kShutdown);
  CHECK(error.worker() == "worker1");
  CHECK_THAT(error.text(), Catch::Contains("worker1 is shutting down"));
  CHECK_FALSE(served.done());
  held.answerAll();
  group[1].close();
  CHECK(served.get().ok());
}

TEST_CASE("a worker says goodbye before it closes its connections") {
  LoopbackGroup group({});
  HeldRequests held(1);
  group[1].on(kCall, Messenger::Where::kPool, held.handler());
  std::promise<WorkerInfo> lost;
  group[0].onWorkerLost([&](const WorkerInfo& worker) { lost.set_value(worker); });
  group.start();
  Pending call;
  group[0].request(1, message(kCall), kNoLimit, call.handler());
  held.awaitAll();
  group[1].beginEnd(0ms);
  group[1].close();
  const auto error = failureOf(call);
  CHECK(error.code() == ErrorCode::kWorkerLost);
  CHECK_THAT(error.text(), Catch::Contains("worker1 has shut down"));
  CHECK(lost.get_future().get().name == "worker1");  // what it owned is gone
}

TEST_CASE("a function that serves a call may make calls while its worker ends; other threads may not") {
  LoopbackGroup group({.size = 3});
  std::latch arrived(1), go(1);
  group[1].on(kCall, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    arrived.count_down();
    go.wait();
    group[1].request(
        2, message(kCall), 10s, [responder](Result<Message> reply) { responder.complete(std::move(reply)); });
  });
  group[2].on(kCall, Messenger::Where::kLoop, [](const Request&, const Responder& responder) {
    responder.reply(message(Kind::kReply, "nested"));
  });
  group.start();
  Pending call, other;
  group[0].request(1, message(kCall), kNoLimit, call.handler());
  arrived.wait();
  CHECK_FALSE(group[1].drain(0ms));
  group[1].request(2, message(kCall), 10s, other.handler());
  CHECK(failureOf(other).code() == ErrorCode::kShutdown);
  go.count_down();
  group[1].close();
  CHECK(call.get().take().payload == "nested");
}

TEST_CASE("the end does not wait for calls whose caller has ended") {
  LoopbackGroup group({});
  HeldRequests held(1);
  group[1].on(kCall, Messenger::Where::kPool, held.handler());
  group.start();
  Pending call;
  group[0].request(1, message(kCall), kNoLimit, call.handler());
  held.awaitAll();
  group[0].close();
  CHECK(group[1].drain(kServedCallsGrace - 1s));  // it would be false after that time
  held.answerAll();
}

TEST_CASE("a call that is served for longer than the grace time does not hold up the end any longer") {
  LoopbackGroup group({});
  HeldRequests held(1);
  group[1].on(kCall, Messenger::Where::kPool, held.handler());
  group.start();
  Pending call;
  group[0].request(1, message(kCall), kNoLimit, call.handler());
  held.awaitAll();
  CHECK(group[1].close(1h));
  CHECK(failureOf(call).code() == ErrorCode::kWorkerLost);
  held.answerAll();
}

TEST_CASE("replies that are written as a worker ends arrive, however many bytes they have") {
  constexpr int kCalls = 50;
  const bool within_host = GENERATE(false, true);
  LoopbackGroup group({.transport = [&] { return nativeTransport(within_host); }});
  HeldRequests held(kCalls);
  group[1].on(kCall, Messenger::Where::kPool, held.handler());
  group.start();
  std::vector<Pending> calls(kCalls);
  for (auto& call : calls) group[0].request(1, message(kCall), kNoLimit, call.handler());
  held.awaitAll();
  held.answerAll({.kind = Kind::kReply, .tensors = {at::ones({1 << 20})}});
  group[1].close();
  int answered = 0;
  for (auto& call : calls) answered += call.get().ok() ? 1 : 0;
  CHECK(answered == kCalls);
}

TEST_CASE("a worker that has nothing to answer does not wait for a peer that reads nothing") {
  // The peer's GOODBYE disappears, so it never closes its connection.
  auto policy = [](const FrameInfo& frame, const std::string&) -> Fault {
    return {frame.kind == Kind::kGoodbye ? Fault::Action::kDrop : Fault::Action::kDeliver};
  };
  const bool is_serving = GENERATE(false, true);
  LoopbackGroup group({.faults = policy});
  HeldRequests held(1);
  group[1].on(kCall, Messenger::Where::kPool, held.handler());
  group.start();
  Pending call;
  group[0].request(1, message(kCall), kNoLimit, call.handler());
  held.awaitAll();
  if (is_serving) CHECK_FALSE(group[1].drain(0ms));
  held.answerAll();
  CHECK(call.get().ok());
  CHECK(group[1].leave(0ms) == !is_serving);
  group[1].beginEnd(0ms);  // as a time-out of shutdown that has passed
  CHECK(group[1].leave(0ms));
}

TEST_CASE("the end goes on where it was given up") {
  LoopbackGroup group({});
  HeldRequests held(1);
  group[1].on(kCall, Messenger::Where::kPool, held.handler());
  group.start();
  Pending call;
  group[0].request(1, message(kCall), kNoLimit, call.handler());
  held.awaitAll();
  for (int i = 0; i < 3; ++i) CHECK_FALSE(group[1].close(0ms));
  held.answerAll();
  while (!group[1].close(1ms)) {
  }
  CHECK(call.get().ok());
  CHECK(group[1].close(0ms));
}

TEST_CASE("two workers that end at once do not wait for each other's calls") {
  LoopbackGroup group({});
  std::latch arrived(2), go(1);
  for (int id = 0; id < 2; ++id) {
    group[id].on(kCall, Messenger::Where::kPool, [&, id](const Request&, const Responder& responder) {
      arrived.count_down();
      go.wait();
      group[id].request(1 - id, message(Kind::kCppRemote), kNoLimit, [responder](Result<Message> reply) {
        responder.complete(std::move(reply));
      });
    });
    group[id].on(Kind::kCppRemote, Messenger::Where::kLoop, [](const Request&, const Responder& responder) {
      responder.reply(message(Kind::kReply));
    });
  }
  group.start();
  Pending calls[2];
  for (int id = 0; id < 2; ++id) group[id].request(1 - id, message(kCall), kNoLimit, calls[id].handler());
  arrived.wait();
  for (int id = 0; id < 2; ++id) CHECK_FALSE(group[id].drain(0ms));
  go.count_down();
  std::thread other([&] { group[1].close(); });
  group[0].close();
  other.join();
  for (auto& call : calls) CHECK_NOTHROW(call.get());
}
