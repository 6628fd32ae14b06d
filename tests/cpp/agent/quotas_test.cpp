// Quotas: what one caller may use of a worker at a time.

#include "agent/quotas.h"

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include "agent/held_requests.h"
#include "agent/loopback_group.h"
#include "outcomes.h"
#include "wire/codec.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

constexpr auto kCall = Kind::kCppCall;
constexpr auto kRemote = Kind::kCppRemote;

Error errorOf(Pending& pending) {
  auto result = pending.get();
  REQUIRE_FALSE(result.ok());
  return result.error();
}

void requireQuotaError(const Error& error, const std::string& field) {
  CHECK(error.code() == ErrorCode::kQuotaExceeded);
  CHECK(error.worker() == "worker1");
  CHECK_THAT(error.text(), Catch::Contains("worker1 grants worker0") && Catch::Contains("`" + field + "`"));
}

void echo(Request request, const Responder& responder) {
  request.message.kind = Kind::kReply;
  responder.reply(std::move(request.message));
}

}  // namespace

TEST_CASE("a caller with as many calls as its quota allows gets an error, and may call again when one has ended") {
  LoopbackGroup group({.size = 3, .callee_quotas = {{"worker0", {.calls = 2}}}});
  HeldRequests held(2);
  group[1].on(kCall, Messenger::Where::kPool, held.handler());
  group[1].on(kRemote, Messenger::Where::kPool, echo);
  group.start();
  Pending first, second, third, of_another, later;
  group[0].request(1, message(kCall), 10s, first.handler());
  group[0].request(1, message(kCall), 10s, second.handler());
  held.awaitAll();
  group[0].request(1, message(kRemote), 10s, third.handler());
  requireQuotaError(errorOf(third), "calls");
  group[2].request(1, message(kRemote), 10s, of_another.handler());
  CHECK(of_another.get().ok());
  held.answerAll();
  CHECK(first.get().ok());
  CHECK(second.get().ok());
  group[0].request(1, message(kRemote), 10s, later.handler());
  CHECK(later.get().ok());
  CHECK(group[1].metrics().at("agent.refused_by_quota") == "1");
}

TEST_CASE("requests of more bytes than the quota allows get an error, one by one and together") {
  LoopbackGroup group({.callee_quotas = {{"worker*", {.bytes = 100'000}}}});
  HeldRequests held(1);
  group[1].on(kCall, Messenger::Where::kPool, held.handler());
  group[1].on(kRemote, Messenger::Where::kPool, echo);
  group.start();
  const auto of = [](Kind kind, int64_t bytes) {
    auto request = message(kind);
    request.tensors = {at::ones({bytes}, at::kByte)};
    return request;
  };
  Pending alone, first, second, small;
  group[0].request(1, of(kRemote, 200'000), 10s, alone.handler());
  requireQuotaError(errorOf(alone), "bytes");
  group[0].request(1, of(kCall, 90'000), 10s, first.handler());
  held.awaitAll();
  group[0].request(1, of(kRemote, 90'000), 10s, second.handler());
  requireQuotaError(errorOf(second), "bytes");
  group[0].request(1, of(kRemote, 1'000), 10s, small.handler());
  CHECK(small.get().ok());
  held.answerAll();
  CHECK(first.get().ok());
}

TEST_CASE("a remote call beyond the quota of RRefs gets an error until an earlier RRef has ended") {
  LoopbackGroup group({.callee_quotas = {{"*", {.rrefs = 1}}}});
  Mutex mutex;
  std::shared_ptr<const void> rref;
  group[1].on(kRemote, Messenger::Where::kPool, [&](Request request, const Responder& responder) {
    {
      MutexLock lock(mutex);
      rref = request.rref_quota_token;
    }
    echo(std::move(request), responder);
  });
  group.start();
  const auto call = [&] {
    Pending pending;
    group[0].request(1, message(kRemote), 10s, pending.handler());
    return pending.get();
  };
  CHECK(call().ok());
  // The request may be destroyed a little later than it is answered.
  const auto refused = call();
  REQUIRE_FALSE(refused.ok());
  requireQuotaError(refused.error(), "rrefs");
  {
    MutexLock lock(mutex);
    rref.reset();
  }
  CHECK(eventually([&] { return call().ok(); }));
}

TEST_CASE("the first rule that matches applies, and a caller that none matches has no quota") {
  Quotas quotas("me", {{"client-1", {.calls = 1}}, {"client-*", {.calls = 2}}});
  const auto calls = [&](const std::string& caller) {
    const auto usage = quotas.usageOf(caller);
    if (!usage) return -1;
    std::vector<CallerUsage::Token> tokens;
    try {
      for (;;) tokens.push_back(usage->takeCall(0));
    } catch (const Error&) {
      return static_cast<int>(tokens.size());
    }
  };
  CHECK(calls("client-1") == 1);
  CHECK(calls("client-2") == 2);
  CHECK(calls("trainer") == -1);
  CHECK(calls("client-1") == 1);  // all tokens were given back
}

TEST_CASE("a quota that is close to the largest number does not overflow") {
  constexpr auto kMost = ~uint64_t{0};
  Quotas quotas("me", {{"*", {.bytes = kMost}}});
  const auto usage = quotas.usageOf("caller");
  const auto most = usage->takeCall(kMost);
  CHECK_THROWS_AS(usage->takeCall(1), Error);
  CHECK_THROWS_AS(usage->takeCall(kMost), Error);
}

namespace {

/// A peer of worker1 that only says HELLO.
class OpenedConnection final : public ConnectionHandler {
 public:
  static std::shared_ptr<OpenedConnection> open(Transport& transport, const std::string& address) {
    auto opened = std::make_shared<OpenedConnection>();
    opened->connection = transport.connect(address, "worker1", opened);
    const auto said = hello(LoopbackGroup::infoOf(0), LoopbackGroup::incarnationOf(0));
    opened->connection->send(encodeFrame(said), [](const Status&) {});
    return opened;
  }
  void onFrame(Frame frame) override {
    MutexLock lock(mutex_);
    answers_.push_back(decodeFrame(std::move(frame)));
  }
  void onClosed(const Error&) override { closed = true; }
  std::vector<Message> answers() {
    MutexLock lock(mutex_);
    return answers_;
  }

  std::shared_ptr<Connection> connection;
  std::atomic<bool> closed{false};

 private:
  Mutex mutex_;
  std::vector<Message> answers_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace

TEST_CASE("a caller with as many connections as its quota allows learns the reason, and cannot open any number more") {
  LoopbackGroup group({.callee_quotas = {{"worker0", {.connections = 2}}}});
  group[1].on(kCall, Messenger::Where::kPool, echo);
  group.start();
  const auto transport = makeLoopbackTransport(group.network());
  std::vector<std::shared_ptr<OpenedConnection>> opened;
  for (int i = 0; i < 10; ++i) opened.push_back(OpenedConnection::open(*transport, group.address(1)));
  const auto closed = [&] {
    return std::ranges::count_if(opened, [](const auto& each) { return each->closed.load(); });
  };
  CHECK(eventually([&] { return closed() == 7; }));
  for (int i = 0; i < 3; ++i) {
    opened[i]->connection->send(encodeFrame({.kind = kCall, .call = 1}), [](const Status&) {});
    REQUIRE(eventually([&] { return opened[i]->answers().size() == 1; }));
    const auto answer = opened[i]->answers().front();
    CHECK(answer.kind == (i < 2 ? Kind::kReply : Kind::kError));
    if (i == 2) requireQuotaError(decodeError(answer), "connections");
  }
  opened[0]->connection->close();
  CHECK(eventually([&] {
    const auto again = OpenedConnection::open(*transport, group.address(1));
    again->connection->send(encodeFrame({.kind = kCall, .call = 1}), [](const Status&) {});
    const bool is_served = eventually([&] { return again->closed || !again->answers().empty(); }) &&
        !again->answers().empty() && again->answers().front().kind == Kind::kReply;
    if (!is_served) again->connection->close();
    return is_served;
  }));
  transport->close();
}
