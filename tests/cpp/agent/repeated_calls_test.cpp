// Calls that may be repeated: what is sent again, what the callee runs once, and the breaker.

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include <atomic>
#include <latch>
#include <random>

#include "agent/loopback_group.h"
#include "base/repetition.h"
#include "calls/repeatable_header.h"
#include "outcomes.h"
#include "stress/connection_cutter.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

constexpr auto kOnce = Kind::kCppCall;

Message repeatable(std::string payload, uint32_t retries, std::string key = {}, RetryPolicy policy = {}) {
  auto call = message(kOnce, std::move(payload));
  policy.retries = retries;
  policy.first_delay = std::min<Duration>(policy.first_delay, 2ms);
  call.repetition = std::make_shared<Repetition>(Repetition{.policy = policy, .key = std::move(key)});
  return call;
}

/// Two workers whose connections the test can cut, and a function on worker1 that counts.
struct CutGroup {
  explicit CutGroup(LoopbackGroup::Options options = {}) : group(prepare(std::move(options))) {}

  LoopbackGroup::Options prepare(LoopbackGroup::Options options) {
    options.transport = [this] {
      auto cutter = std::make_unique<ConnectionCutter>(makeLoopbackTransport(network));
      cutters.push_back(cutter.get());
      return cutter;
    };
    return options;
  }
  /// Cuts the connection between the workers.
  void cut() {
    std::minstd_rand random(1);
    cutters.at(0)->cut(random);
  }
  /// Counts the runs, and calls `then`.
  void serve(std::function<void(int run, const Request&, const Responder&)> then) {
    group[1].on(kOnce, Messenger::Where::kPool, [this, then = std::move(then)](Request request, Responder responder) {
      then(++runs, request, responder);
    });
    group.start();
  }

  std::shared_ptr<LoopbackNetwork> network = makeLoopbackNetwork();
  std::vector<ConnectionCutter*> cutters;
  std::atomic<int> runs{0};
  LoopbackGroup group;
};

void answer(const Responder& responder, std::string payload) {
  responder.reply(message(Kind::kReply, std::move(payload)));
}

}  // namespace

TEST_CASE("a call whose reply is lost is sent again and runs once") {
  const auto key = GENERATE(std::string(), std::string("order 17"));
  CutGroup test;
  test.serve([&](int run, const Request&, const Responder& responder) {
    test.cut();  // the answer has no way back
    answer(responder, "run " + std::to_string(run));
  });
  Pending pending;
  test.group[0].request(1, repeatable("x", 5, key), 20s, pending.handler());
  CHECK(pending.get().take().payload == "run 1");
  CHECK(test.runs == 1);
}

TEST_CASE("a call that is sent again while it runs waits for its answer") {
  CutGroup test;
  std::latch has_begun(1);
  Mutex mutex;
  std::vector<Responder> held;
  test.serve([&](int, const Request&, const Responder& responder) {
    {
      MutexLock lock(mutex);
      held.push_back(responder);
    }
    has_begun.count_down();
  });
  Pending pending;
  test.group[0].request(1, repeatable("x", 5), 20s, pending.handler());
  has_begun.wait();
  test.cut();
  while (test.group[1].metrics().at("agent.repeated_calls") == "0") std::this_thread::yield();
  CHECK_FALSE(pending.done());
  answer(held.at(0), "late");
  CHECK(pending.get().take().payload == "late");
  CHECK(test.runs == 1);
  held.clear();
}

TEST_CASE("a call without a repetition is sent once") {
  CutGroup test;
  test.serve([&](int, const Request&, const Responder& responder) {
    test.cut();
    answer(responder, "");
  });
  Pending pending;
  test.group[0].request(1, message(kOnce, "x"), 20s, pending.handler());
  CHECK(errorOf(pending).code() == ErrorCode::kWorkerLost);
  CHECK(test.group[0].metrics().at("agent.retries") == "0");
  CHECK(test.runs == 1);
}

TEST_CASE("an error that the callee answers ends the call, whatever its code") {
  const auto code = GENERATE(ErrorCode::kWorkerLost, ErrorCode::kUserException, ErrorCode::kUnknownWorker);
  LoopbackGroup group({});
  std::atomic<int> runs{0};
  group[1].on(kOnce, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    ++runs;
    responder.fail(Error(code, "of the function", "worker1"));
  });
  group.start();
  Pending pending;
  group[0].request(1, repeatable("x", 5), 20s, pending.handler());
  const auto error = errorOf(pending);
  CHECK(error.code() == code);
  CHECK(error.text() == "of the function");
  CHECK(runs == 1);
}

TEST_CASE("a call that was never sent is sent again, and the error says that it has not run") {
  std::atomic<int> faults{2};
  const bool gives_up = GENERATE(false, true);
  LoopbackGroup group({.send_faults = [&](const Message&) -> SendFault { return {.fail = gives_up || faults-- > 0}; }});
  group[1].on(
      kOnce, Messenger::Where::kPool, [&](const Request&, const Responder& responder) { answer(responder, "here"); });
  group.start();
  Pending pending;
  group[0].request(1, repeatable("x", 3), 20s, pending.handler());
  if (!gives_up) {
    CHECK(pending.get().take().payload == "here");
    CHECK(group[0].metrics().at("agent.retries") == "2");
    return;
  }
  const auto error = errorOf(pending);
  CHECK(error.code() == ErrorCode::kWorkerLost);
  CHECK(error.worker() == "worker1");
  CHECK_THAT(error.text(), Catch::Contains("sent 4 times") && Catch::Contains("worker1 has not run the call"));
}

TEST_CASE("attempts and pauses end with the time-out of the call") {
  LoopbackGroup group({.send_faults = [](const Message&) -> SendFault { return {.fail = true}; }});
  group.start();
  Pending pending;
  auto call = repeatable("x", 1000, {}, {.max_delay = 20ms, .breaker_losses = 0});
  const auto start = std::chrono::steady_clock::now();
  group[0].request(1, Message(call), 300ms, pending.handler());
  CHECK_THAT(errorOf(pending).text(), Catch::Contains("leaves no time"));
  CHECK(std::chrono::steady_clock::now() - start < 10s);
}

TEST_CASE("the time-out of an attempt tells the time-out of the call") {
  std::latch end(1);
  std::atomic<int> attempts{0};
  LoopbackGroup group({.send_faults = [&](const Message&) -> SendFault { return {.fail = ++attempts == 1}; }});
  group[1].on(kOnce, Messenger::Where::kPool, [&](const Request&, const Responder&) { end.wait(); });
  group.start();
  Pending pending;
  group[0].request(1, repeatable("x", 5), 300ms, pending.handler());
  const auto error = errorOf(pending);
  end.count_down();
  CHECK(error.code() == ErrorCode::kTimeout);
  CHECK_THAT(error.text(), Catch::Contains("set timeout (300 ms)") && Catch::Contains("sent 2 times"));
}

TEST_CASE("a call with a key gets the first one's answer, whatever has become of its tensors") {
  LoopbackGroup group({});
  auto state = at::zeros({3});
  std::atomic<int> runs{0};
  group[1].on(kOnce, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    ++runs;
    state.add_(1);
    auto reply = message(Kind::kReply, "sum");
    reply.tensors = {state};
    responder.reply(std::move(reply));
  });
  group.start();
  const auto call = [&](const std::string& key) {
    Pending pending;
    group[0].request(1, repeatable("x", 0, key), 20s, pending.handler());
    return pending.get().take().tensors.at(0);
  };
  CHECK(call("a").equal(at::ones({3})));
  CHECK(call("b").equal(at::full({3}, 2.0F)));
  CHECK(call("a").equal(at::ones({3})));
  CHECK(runs == 2);
}

TEST_CASE("an error is the answer to a key, too") {
  LoopbackGroup group({});
  std::atomic<int> runs{0};
  group[1].on(kOnce, Messenger::Where::kPool, [&](const Request&, const Responder&) {
    throw Error(ErrorCode::kUserException, "run " + std::to_string(++runs), "worker1", "detail");
  });
  group.start();
  for (int i = 0; i < 3; ++i) {
    Pending pending;
    group[0].request(1, repeatable("x", 2, "a"), 20s, pending.handler());
    const auto error = errorOf(pending);
    CHECK(error.code() == ErrorCode::kUserException);
    CHECK(error.text() == "run 1");
    CHECK(error.detail() == "detail");
  }
}

TEST_CASE("a key belongs to one call") {
  LoopbackGroup group({});
  for (const auto kind : {kOnce, Kind::kBuiltinCall}) {
    group[1].on(
        kind, Messenger::Where::kPool, [](const Request&, const Responder& responder) { answer(responder, "ran"); });
  }
  group.start();
  auto call = repeatable("x", 0, "a");
  call.tensors = {at::ones({4})};
  Pending first;
  group[0].request(1, Message(call), 20s, first.handler());
  CHECK(first.get().ok());
  const auto refused = [&](const std::function<void(Message&)>& change) {
    auto other = call;
    change(other);
    Pending pending;
    group[0].request(1, Message(other), 20s, pending.handler());
    const auto error = errorOf(pending);
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    CHECK_THAT(error.text(), Catch::Contains("\"a\"") && Catch::Contains("Use one key for one call"));
  };
  refused([](Message& other) { other.payload = "y"; });
  refused([](Message& other) { other.kind = Kind::kBuiltinCall; });
  refused([](Message& other) { other.tensors = {at::zeros({4})}; });
  refused([](Message& other) { other.tensors = {at::ones({2, 2})}; });
  refused([](Message& other) { other.tensors.emplace_back(at::ones({1})); });
}

TEST_CASE("each caller has its own keys") {
  LoopbackGroup group({.size = 3});
  std::atomic<int> runs{0};
  group[1].on(kOnce, Messenger::Where::kPool, [&](const Request& request, const Responder& responder) {
    ++runs;
    answer(responder, "for " + request.from.name);
  });
  group.start();
  for (const int caller : {0, 2, 1}) {
    for (int i = 0; i < 2; ++i) {
      Pending pending;
      group[caller].request(1, repeatable("x", 0, "a"), 20s, pending.handler());
      CHECK(pending.get().take().payload == "for worker" + std::to_string(caller));
    }
  }
  CHECK(runs == 3);
}

TEST_CASE("many threads that use one key run the call once") {
  LoopbackGroup group({});
  std::atomic<int> runs{0};
  group[1].on(kOnce, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    answer(responder, std::to_string(++runs));
  });
  group.start();
  constexpr int kThreads = 8;
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int key = 0; key < 50; ++key) {
        Pending pending;
        group[0].request(1, repeatable("x", 0, std::to_string(key)), 20s, pending.handler());
        right += pending.get().ok() ? 1 : 0;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(right == kThreads * 50);
  CHECK(runs == 50);
}

TEST_CASE("retries are refused for RRefs, and repetition for what is no call") {
  LoopbackGroup group({});
  group.start();
  auto with_rref = repeatable("x", 1);
  with_rref.headers.push_back({HeaderKind::kRRefForks, ""});
  Pending first;
  group[0].request(1, Message(with_rref), 20s, first.handler());
  const auto error = errorOf(first);
  CHECK(error.code() == ErrorCode::kInvalidArgument);
  CHECK_THAT(error.text(), Catch::Contains("RRefs") && Catch::Contains("worker1"));
  auto fetch = repeatable("x", 1);
  fetch.kind = Kind::kRRefFetch;
  Pending second;
  group[0].request(1, Message(fetch), 20s, second.handler());
  CHECK(errorOf(second).code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("after many losses calls with retries fail at once, until one finds the worker again") {
  std::atomic<bool> fails{true};
  std::atomic<int> sent{0};
  LoopbackGroup group({.send_faults = [&](const Message&) -> SendFault {
    ++sent;
    return {.fail = fails.load()};
  }});
  group[1].on(
      kOnce, Messenger::Where::kPool, [](const Request&, const Responder& responder) { answer(responder, "here"); });
  group.start();
  const RetryPolicy policy{.breaker_losses = 3, .breaker_cooldown = 50ms};
  const auto call = [&](const Message& message) {
    Pending pending;
    group[0].request(1, Message(message), 20s, pending.handler());
    return pending.get();
  };
  CHECK_FALSE(call(repeatable("x", 3, {}, policy)));
  CHECK(sent == 4);
  auto slow = policy;
  slow.breaker_cooldown = 1h;
  const auto refused = call(repeatable("x", 3, {}, slow));
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code() == ErrorCode::kWorkerLost);
  CHECK_THAT(refused.error().text(), Catch::Contains("4 times in a row") && Catch::Contains("Nothing was sent"));
  CHECK(sent == 4);
  CHECK_FALSE(call(message(kOnce, "plain")));  // it is not for calls without retries
  CHECK_FALSE(call(repeatable("x", 0, "key", policy)));
  CHECK(sent == 6);
  fails = false;
  std::this_thread::sleep_for(60ms);  // longer than the cooldown of the breaker
  CHECK(call(repeatable("x", 3, {}, policy)));
  CHECK(call(repeatable("x", 3, {}, slow)));  // the breaker is closed
}

TEST_CASE("the breaker counts on while a worker is removed from the group") {
  std::function<void()> on_third_send;
  std::atomic<int> sends{0};
  LoopbackGroup group({.send_faults = [&](const Message&) -> SendFault {
    if (++sends == 3) on_third_send();
    return {.fail = true};
  }});
  group.start();
  on_third_send = [&] { group[0].directory().remove(1); };
  const auto call = [&] {
    Pending pending;
    group[0].request(1, repeatable("x", 3, {}, {.breaker_losses = 3, .breaker_cooldown = 1h}), 20s, pending.handler());
    return pending.get();
  };
  CHECK_FALSE(call());
  CHECK_THAT(call().error().text(), Catch::Contains("4 times in a row"));
}

TEST_CASE("calls between two attempts fail when their worker ends") {
  LoopbackGroup group({.send_faults = [](const Message&) -> SendFault { return {.fail = true}; }});
  group.start();
  Pending pending;
  auto call = message(kOnce, "x");
  call.repetition =
      std::make_shared<Repetition>(Repetition{.policy = {.retries = 5, .first_delay = 1h, .max_delay = 1h}, .key = {}});
  group[0].request(1, Message(call), kNoLimit, pending.handler());
  CHECK_FALSE(pending.done());
  group[0].close();
  CHECK(errorOf(pending).code() == ErrorCode::kShutdown);
  CHECK(pending.completions() == 1);
}

TEST_CASE("a call that a worker refuses because it ends is sent again") {
  LoopbackGroup group({});
  std::atomic<int> runs{0};
  group[1].on(kOnce, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    answer(responder, std::to_string(++runs));
  });
  group.start();
  group[1].beginEnd(kNoLimit);
  Pending plain;
  group[0].request(1, message(kOnce, "x"), 20s, plain.handler());
  CHECK(errorOf(plain).code() == ErrorCode::kShutdown);
  Pending pending;
  group[0].request(1, repeatable("x", 2, {}, {.max_delay = 5ms}), 20s, pending.handler());
  const auto error = errorOf(pending);
  CHECK(error.code() == ErrorCode::kShutdown);
  CHECK_THAT(error.text(), Catch::Contains("sent 3 times") && Catch::Contains("has not run"));
  CHECK(runs == 0);
}

TEST_CASE("repetitions count against the quota of their caller") {
  LoopbackGroup group({.callee_quotas = {{"*", {.calls = 2}}}});
  std::latch has_begun(1);
  Mutex mutex;
  std::vector<Responder> held;
  group[1].on(kOnce, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    MutexLock lock(mutex);
    held.push_back(responder);
    has_begun.count_down();
  });
  group.start();
  Pending first;
  group[0].request(1, repeatable("x", 0, "a"), 20s, first.handler());
  has_begun.wait();
  Pending second;
  group[0].request(1, repeatable("x", 0, "a"), 20s, second.handler());
  Pending third;
  group[0].request(1, repeatable("x", 0, "a"), 20s, third.handler());
  CHECK(errorOf(third).code() == ErrorCode::kQuotaExceeded);
  while (group[1].metrics().at("agent.repeated_calls") == "0") std::this_thread::yield();
  answer(held.at(0), "both");
  CHECK(first.get().take().payload == "both");
  CHECK(second.get().take().payload == "both");
  held.clear();
}

TEST_CASE("a header arrives as it was written, and one that no worker writes is refused") {
  const auto keyed =
      RepeatableHeader::decode(RepeatableHeader{.key = "k", .incarnation = 4, .digest = 3, .attempt = 2}.encode());
  CHECK((keyed.key == "k" && keyed.incarnation == 4 && keyed.digest == 3 && keyed.attempt == 2));
  const auto numbered = RepeatableHeader::decode(RepeatableHeader{.number = 7, .oldest = 5}.encode());
  CHECK((numbered.number == 7 && numbered.oldest == 5 && numbered.key.empty()));
  for (const auto& bad :
       {RepeatableHeader{}, RepeatableHeader{.key = "k", .number = 1}, RepeatableHeader{.number = 2, .oldest = 3},
        RepeatableHeader{.key = std::string(kMaxKeyBytes + 1, 'k')}, RepeatableHeader{.number = 1, .attempt = 0}}) {
    CHECK_THROWS_AS(RepeatableHeader::decode(bad.encode()), Error);
  }
  const auto good = RepeatableHeader{.key = "key", .digest = 3}.encode();
  for (size_t size = 0; size < good.size(); ++size) {
    CHECK_THROWS_AS(RepeatableHeader::decode(good.substr(0, size)), Error);
  }
  CHECK_THROWS_AS(RepeatableHeader::decode(good + "x"), Error);

  LoopbackGroup group({});
  group[1].on(
      kOnce, Messenger::Where::kPool, [](const Request&, const Responder& responder) { answer(responder, ""); });
  group.start();
  auto forged = message(kOnce, "x");
  forged.headers.push_back({HeaderKind::kRepeatable, "garbage"});
  Pending pending;
  group[0].request(1, Message(forged), 20s, pending.handler());
  CHECK(errorOf(pending).code() == ErrorCode::kProtocol);
}
