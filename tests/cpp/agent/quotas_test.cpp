// Quotas: what one caller may use of a worker at a time.

#include "peers/quotas.h"

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include <fstream>
#include <optional>
#include <unistd.h>

#include "agent/held_requests.h"
#include "agent/loopback_group.h"
#include "outcomes.h"
#include "transport/native/auth/manual_peer.h"
#include "transport/native/frame_stream.h"
#include "transport/native/transport.h"
#include "wire/codec.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

constexpr auto kRemote = Kind::kCppRemote;

void requireQuotaError(const Error& error, const std::string& field) {
  CHECK(error.code() == ErrorCode::kQuotaExceeded);
  CHECK(error.worker() == "worker1");
  CHECK_THAT(error.text(), Catch::Contains("worker1 grants worker0") && Catch::Contains("`" + field + "`"));
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
  void onFrame(Frame&& frame) override {
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

TEST_CASE("a connection of a peer that has proved its name counts before HELLO") {
  const auto proved = [](int id) {
    return std::optional(PeerIdentity{.name = LoopbackGroup::infoOf(id).name, .roles = {"client"}});
  };
  LoopbackGroup group({.identity = proved, .callee_quotas = {{"worker0", {.connections = 2}}}});
  group.start();
  const auto transport = makeLoopbackTransport(group.network(), {}, proved(0));
  std::vector<std::shared_ptr<OpenedConnection>> opened;
  for (int i = 0; i < 10; ++i) {
    opened.push_back(std::make_shared<OpenedConnection>());
    opened.back()->connection = transport->connect(group.address(1), "worker1", opened.back());
    opened.back()->connection->send(encodeFrame({.kind = Kind::kPing}), [](const Status&) {});
  }
  CHECK(eventually(
      [&] { return std::ranges::count_if(opened, [](const auto& each) { return each->closed.load(); }) == 7; }));
  transport->close();
}

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

namespace {

/// A peer of worker1 over TCP that speaks by hand, and has finished the handshake.
struct HandshakenPeer : ManualPeer {
  explicit HandshakenPeer(const std::string& address) : ManualPeer(address) {
    send(hello(""));
    receive();
    send(confirm());
    receive();
  }
  void say(const Message& message) {
    const auto frame = encodeFrame(message);
    announce(frame.head.size());
    sendBytes(frame.head);
  }
  /// Sends the header of a frame without segments.
  void announce(uint64_t head_bytes) {
    const native::FrameHeader header{.head_bytes = head_bytes};
    sendBytes({reinterpret_cast<const char*>(&header), sizeof(header)});
  }
  /// Sends a part of a large call, which announces `bytes` of payload.
  void begin(CallId call, uint64_t bytes) {
    auto head = encodeFrame({.kind = kCall, .call = call, .payload = std::string(1000, 'x')}).head;
    announce(head.size() + bytes);
    sendBytes(head);
  }
  Message answer() {
    native::FrameHeader header;
    REQUIRE(::recv(fd(), &header, sizeof(header), MSG_WAITALL) == sizeof(header));
    Frame frame{.head = std::string(header.head_bytes, '\0')};
    REQUIRE(::recv(fd(), frame.head.data(), frame.head.size(), MSG_WAITALL) == static_cast<ssize_t>(frame.head.size()));
    return decodeFrame(std::move(frame));
  }
};

size_t residentBytes() {
  std::ifstream in("/proc/self/statm");
  size_t all = 0, resident = 0;
  in >> all >> resident;
  return resident * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

/// An agent at a native transport, with one rule for all callers.
struct QuotaServer {
  explicit QuotaServer(Quota quota)
      : agent(
            {.self = {"worker1", 1}, .incarnation = 1, .quotas = {{"*", quota}}},
            native::makeTransport(
                {.host = "127.0.0.1", .node_name = "worker1", .unix_sockets = false, .handshake_deadline = 5min}),
            makeThreadTimer()) {
    agent.on(kCall, Messenger::Where::kPool, echo);
    address = agent.listen();
  }
  ~QuotaServer() { agent.close(); }
  Agent agent;
  std::string address;
};

}  // namespace

TEST_CASE("the bytes of a request count when it begins to arrive, over all connections of its caller") {
  QuotaServer server({.bytes = 1 << 20});
  HandshakenPeer quick(server.address);
  quick.say(hello({"mallory", 7}, 5));
  const auto is_refused = [&] {
    quick.say({.kind = kCall, .call = 2, .payload = std::string(300'000, 'x')});
    const auto answer = quick.answer();
    return answer.kind == Kind::kError && decodeError(answer).code() == ErrorCode::kQuotaExceeded;
  };
  std::optional<HandshakenPeer> slow;
  CHECK(eventually([&] {
    slow.emplace(server.address);
    slow->say(hello({"mallory", 7}, 5));
    slow->begin(1, 900'000);
    std::this_thread::sleep_for(20ms);  // so that it arrives first: of the two the later one is refused
    return is_refused();
  }));
  slow.reset();
  CHECK(eventually([&] { return !is_refused(); }));
}

TEST_CASE("a request that announces more than the quota is answered, and its bytes occupy no memory") {
  constexpr uint64_t kAnnounced = uint64_t{3} << 30, kSent = 96 << 20;
  QuotaServer server({.bytes = 1 << 20});
  HandshakenPeer peer(server.address);
  peer.say(hello({"mallory", 7}, 5));
  const auto before = residentBytes();
  peer.begin(1, kAnnounced);
  const std::string part(1 << 20, 'x');
  for (uint64_t sent = 0; sent < kSent; sent += part.size()) peer.sendBytes(part);
  CHECK(residentBytes() < before + kSent / 4);
  // A whole one is answered, and the connection stays open.
  HandshakenPeer other(server.address);
  other.say(hello({"mallory", 7}, 5));
  other.say({.kind = kCall, .call = 3, .payload = std::string(2 << 20, 'x')});
  const auto answer = other.answer();
  REQUIRE(answer.kind == Kind::kError);
  CHECK(answer.call == 3);
  CHECK(decodeError(answer).code() == ErrorCode::kQuotaExceeded);
  other.say({.kind = kCall, .call = 4});
  CHECK(other.answer().kind == Kind::kReply);
}

TEST_CASE("a large request that is sent until it is answered counts against the quota of bytes") {
  QuotaServer server({.bytes = 1 << 20});
  HandshakenPeer peer(server.address);
  peer.say(hello({"mallory", 7}, 5));
  peer.say({.kind = Kind::kRRefUserDelete, .call = 3, .payload = std::string(2 << 20, 'x')});
  const auto answer = peer.answer();
  REQUIRE(answer.kind == Kind::kError);
  CHECK(decodeError(answer).code() == ErrorCode::kQuotaExceeded);
}

TEST_CASE("nothing large is read from a peer before its HELLO") {
  QuotaServer server({});
  HandshakenPeer peer(server.address);
  peer.begin(1, 1 << 20);
  CHECK(peer.isClosed());
}

TEST_CASE("a connection counts before HELLO under the name of the handshake, which HELLO cannot change") {
  QuotaServer server({.connections = 2});
  std::vector<std::unique_ptr<HandshakenPeer>> peers;
  for (int i = 0; i < 10; ++i) {
    peers.push_back(std::make_unique<HandshakenPeer>(server.address));
    peers.back()->say({.kind = Kind::kPing});
  }
  for (size_t i = 3; i < peers.size(); ++i) CHECK(peers[i]->isClosed());
  CHECK(peers.front()->answer().kind == Kind::kPong);
  peers.front()->say(hello({"trusted", 7}, 5));
  CHECK(peers.front()->isClosed());
}
