// The links of a connection pool, over a transport that only records.

#include "agent/connection_pool.h"

#include <catch2/catch.hpp>

#include <functional>
#include <memory>
#include <string>

using namespace torchrpc;

namespace {

struct RecordingConnection final : Connection {
  bool is_closed = false;
  std::shared_ptr<ConnectionHandler> handler;

  void send(Frame, std::function<void(Status)> done) override { done(std::nullopt); }
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
  WorkerDirectory directory({"caller", 0});
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
    pool.closeAll(peer, {ErrorCode::kWorkerLost, "callee has been started again", "callee"});
  };
  const auto link = pool.link(1);
  CHECK(transport.opened->is_closed);
  CHECK(link->isClosed());
  CHECK(reason == "callee has been started again");
  REQUIRE(failure);
  CHECK(failure->code() == ErrorCode::kWorkerLost);
}
