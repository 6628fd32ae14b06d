// The links of a connection pool, over a transport that only records.

#include "peers/connection_pool.h"

#include <catch2/catch.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "agent/loopback_group.h"

using namespace torchrpc;

namespace {

struct RecordingConnection final : Connection {
  bool is_closed = false;
  std::shared_ptr<ConnectionHandler> handler;

  void send(Frame&&, SentHandler&& done) override { done(std::nullopt); }
  void close() override {
    is_closed = true;
    if (const auto last = std::exchange(handler, nullptr)) last->onClosed({ErrorCode::kShutdown, "closed here"});
  }
  std::string describe() const override { return "recording"; }
};

struct RecordingTransport final : Transport {
  std::function<void()> on_connect = [] {};
  std::shared_ptr<RecordingConnection> opened;

  std::string listen(Acceptor) override { return "here"; }
  std::shared_ptr<Connection> connect(
      const std::string&, const std::string&, std::shared_ptr<ConnectionHandler> handler) override {
    on_connect();
    opened = std::make_shared<RecordingConnection>();
    opened->handler = std::move(handler);
    return opened;
  }
  void close() override {}
  bool inLoop() const override { return false; }
  std::string describe() const override { return "recording"; }
};

}  // namespace

TEST_CASE("a link that is closed while its connection is being opened ends with the reason of that") {
  RecordingTransport transport;
  WorkerDirectory directory(Peer{{"caller", 0}});
  const WorkerRecord peer{.info = {"callee", 1}, .address = "there", .incarnation = 7, .metadata = {}};
  directory.add(peer);
  std::string reason;
  ConnectionPool pool(
      transport, directory, {},
      {.on_frame = [](const auto&, Frame) {},
       .on_lost = [&reason](const Link&, const Error& error) { reason = error.text(); },
       .on_activity = [](const Link&) {}});
  Status failure;
  transport.on_connect = [&] {
    pool.link(1)->send(encodeFrame({.kind = Kind::kPing}), [&](Status status) { failure = std::move(status); });
    pool.replaceLinks(
        {peer.info, peer.incarnation + 1}, {ErrorCode::kWorkerLost, "callee has been started again", "callee"});
  };
  const auto link = pool.link(1);
  CHECK(transport.opened->is_closed);
  CHECK(link->isClosed());
  CHECK(reason == "callee has been started again");
  REQUIRE(failure);
  CHECK(failure->code() == ErrorCode::kWorkerLost);
}

namespace {

/// A peer that sends to a node and reads nothing: what the node sends to it is never written.
struct DeafPeer final : Transport {
  struct End final : Connection {
    std::vector<SentHandler> unwritten;
    bool is_closed = false;
    void send(Frame&&, SentHandler&& done) override { unwritten.push_back(std::move(done)); }
    void close() override { is_closed = true; }
    std::string describe() const override { return "deaf"; }
  };
  std::shared_ptr<End> end = std::make_shared<End>();
  std::shared_ptr<ConnectionHandler> node;

  std::string listen(Acceptor acceptor) override {
    node = acceptor(end);
    return "here";
  }
  std::shared_ptr<Connection> connect(
      const std::string&, const std::string&, std::shared_ptr<ConnectionHandler>) override {
    throw Error(ErrorCode::kWorkerLost, "it does not listen");
  }
  void close() override {
    const Error closed(ErrorCode::kShutdown, "closed here");
    for (auto& done : std::exchange(end->unwritten, {})) done(closed);
    if (const auto last = std::exchange(node, nullptr)) last->onClosed(closed);
  }
  bool inLoop() const override { return false; }
  std::string describe() const override { return "deaf"; }
  void say(const Message& message) const { node->onFrame(encodeFrame(message)); }
};

/// Keeps the latest event.
struct LatestEvent final : AuditLog {
  AuditEvent event;
  void record(AuditEvent recorded) override { event = std::move(recorded); }
};

}  // namespace

TEST_CASE("a refused message about RRefs is in the audit log") {
  auto transport = std::make_unique<DeafPeer>();
  auto& peer = *transport;
  const auto log = std::make_shared<LatestEvent>();
  Agent agent({.self = {"worker0", 0}, .audit_log = log}, std::move(transport), makeThreadTimer());
  agent.on(Kind::kRRefForkRequest, Messenger::Where::kLoop, [](const Request& request, const Responder& responder) {
    if (request.message.payload == "good") return responder.reply({.kind = Kind::kReply});
    responder.fail(Error(ErrorCode::kRRefDeleted, "there is no such RRef"));
  });
  agent.listen();
  peer.say(test::hello({"worker1", 1}, 5));
  peer.say({.kind = Kind::kRRefForkRequest, .call = 1, .payload = "good"});
  CHECK(log->event.caller.empty());
  peer.say({.kind = Kind::kRRefForkRequest, .call = 2, .payload = "guessed"});
  CHECK(log->event.caller == "unproved: worker1");
  CHECK(log->event.action == "RREF_FORK_REQUEST");
  CHECK_THAT(log->event.reason, Catch::Contains("no such RRef"));
  agent.close();
}

TEST_CASE("a peer that reads nothing makes a node keep one PONG, and a bounded number of refusals and reports") {
  auto transport = std::make_unique<DeafPeer>();
  auto& peer = *transport;
  const auto log = std::make_shared<LatestEvent>();
  Agent agent(
      {.self = {"worker0", 0}, .max_queued_bytes = 1 << 20, .audit_log = log}, std::move(transport), makeThreadTimer());
  agent.on(Kind::kInspect, Messenger::Where::kLoop, [](const Request&, const Responder& responder) {
    responder.reply(test::message(Kind::kReply, std::string(1 << 16, 'x')));
  });
  agent.listen();
  constexpr size_t kPings = 1000, kRequests = 200'000;
  SECTION("PING before HELLO, and after it") {
    for (size_t i = 0; i < kPings; ++i) peer.say({.kind = Kind::kPing});
    CHECK(peer.end->unwritten.size() == 1);
    peer.say(test::hello({"worker1", 1}, 5));
    for (size_t i = 0; i < kPings; ++i) peer.say({.kind = Kind::kPing});
    CHECK(peer.end->unwritten.size() == 1);
    std::exchange(peer.end->unwritten, {}).front()(std::nullopt);
    peer.say({.kind = Kind::kPing});
    CHECK(peer.end->unwritten.size() == 1);
  }
  SECTION("requests that are refused") {
    peer.say(test::hello({"worker1", 1}, 5));
    for (size_t i = 1; i <= kRequests && !peer.end->is_closed; ++i) peer.say({.kind = Kind::kAutogradMark, .call = i});
    CHECK(peer.end->is_closed);
    CHECK(peer.end->unwritten.size() < 100'000);
    CHECK(log->event.action == "disconnect");
    CHECK(log->event.caller == "unproved: worker1");
    CHECK_THAT(log->event.reason, Catch::Contains("does not read"));
  }
  SECTION("reports for a worker") {
    peer.say(test::hello({"worker1", 1}, 5));
    for (size_t i = 1; i <= kPings; ++i) peer.say({.kind = Kind::kInspect, .call = i});
    CHECK(peer.end->unwritten.size() == kPings);
    CHECK(std::stoull(agent.metrics().at("agent.queued_reply_bytes")) < 3 << 20);
  }
  SECTION("reports for an observer") {
    for (size_t i = 1; i <= kPings && !peer.end->is_closed; ++i) peer.say({.kind = Kind::kInspect, .call = i});
    CHECK(peer.end->is_closed);
    CHECK(peer.end->unwritten.size() < 20);
    CHECK(log->event.action == "disconnect");
  }
  agent.close();
}
