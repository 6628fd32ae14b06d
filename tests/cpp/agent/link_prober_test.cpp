// Workers that a node waits for and has no link to: how many it dials at a time, in which order, and which are lost.

#include <catch2/catch.hpp>

#include <algorithm>
#include <map>
#include <set>

#include "agent/agent.h"
#include "testing/manual_timer.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

constexpr WorkerId kWorkers = 100;
constexpr WorkerId kSelf = 40;
constexpr auto kLinkTimeout = 30s;
constexpr auto kLinkRound = kLinkTimeout / 5;

/// A network on which every dial waits until the test answers it. The test's thread does everything.
struct HeldNetwork {
  std::vector<WorkerId> dialled{};  ///< in the order of the dials
  std::map<WorkerId, std::shared_ptr<ConnectionHandler>> unanswered{};
  std::map<WorkerId, std::shared_ptr<ConnectionHandler>> answered{};
  size_t most_unanswered = 0;

  void answer(WorkerId worker) {
    auto handler = unanswered.extract(worker).mapped();
    answered[worker] = handler;
    handler->onFrame(encodeFrame({.kind = Kind::kPong}));
  }
  void refuse(WorkerId worker) { closed(unanswered.extract(worker).mapped()); }
  void cut(WorkerId worker) { closed(answered.extract(worker).mapped()); }
  void answerAll() {
    while (!unanswered.empty()) answer(unanswered.begin()->first);
  }
  static void closed(const std::shared_ptr<ConnectionHandler>& handler) {
    handler->onClosed({ErrorCode::kWorkerLost, "refused"});
  }
};

class HeldConnection final : public Connection {
 public:
  HeldConnection(HeldNetwork& network, WorkerId peer) : network_(network), peer_(peer) {}
  void send(Frame&&, SentHandler&& done) override { done(std::nullopt); }
  void close() override {
    if (network_.unanswered.contains(peer_)) network_.refuse(peer_);
  }
  std::string describe() const override { return "held"; }

 private:
  HeldNetwork& network_;
  const WorkerId peer_;
};

class HeldTransport final : public Transport {
 public:
  explicit HeldTransport(HeldNetwork& network) : network_(network) {}
  std::string listen(Acceptor) override { return "held"; }
  std::shared_ptr<Connection> connect(
      const std::string& address, const std::string&, std::shared_ptr<ConnectionHandler> handler) override {
    const auto peer = static_cast<WorkerId>(std::stoi(address));
    network_.dialled.push_back(peer);
    network_.unanswered[peer] = std::move(handler);
    network_.most_unanswered = std::max(network_.most_unanswered, network_.unanswered.size());
    return std::make_shared<HeldConnection>(network_, peer);
  }
  void close() override {
    while (!network_.unanswered.empty()) network_.refuse(network_.unanswered.begin()->first);
    while (!network_.answered.empty()) network_.cut(network_.answered.begin()->first);
  }
  bool inLoop() const override { return false; }
  std::string describe() const override { return "held"; }

 private:
  HeldNetwork& network_;
};

struct WaitingNode {
  HeldNetwork network;
  std::shared_ptr<ManualTimer> timer = std::make_shared<ManualTimer>();
  Agent agent{
      {.self = infoOf(kSelf), .incarnation = 1, .threads = 1, .liveness = kLinkTimeout},
      std::make_unique<HeldTransport>(network),
      timer};
  std::vector<WorkerId> others{};

  WaitingNode() {
    agent.listen();
    for (WorkerId id = 0; id < kWorkers; ++id) {
      agent.directory().add({.info = infoOf(id), .address = std::to_string(id), .incarnation = 1});
      if (id != kSelf) others.push_back(id);
    }
  }

  static WorkerInfo infoOf(WorkerId id) { return {"worker" + std::to_string(id), id}; }
  std::vector<WorkerId> lost() { return agent.lostAmong(others); }
  size_t dialled() const { return network.dialled.size(); }
};

using Ids = std::vector<WorkerId>;

}  // namespace

TEST_CASE("few workers are dialled at a time, however many are waited for, and how often") {
  WaitingNode node;
  CHECK(node.lost().empty());
  CHECK(node.dialled() == kMaxOpenProbes);
  CHECK(node.lost().empty());
  CHECK(node.agent.lostAmong({1, 2, 3, 99}).empty());
  CHECK(node.dialled() == kMaxOpenProbes);
  node.network.answer(kSelf + 1);
  CHECK(node.dialled() == kMaxOpenProbes + 1);
  node.network.answerAll();
  CHECK(node.dialled() == node.others.size());
  CHECK(node.network.most_unanswered == kMaxOpenProbes);
  CHECK(std::set(node.network.dialled.begin(), node.network.dialled.end()).size() == node.others.size());
  CHECK(node.lost().empty());
  CHECK(node.dialled() == node.others.size());
}

TEST_CASE("the members of a group do not dial the same workers first") {
  WaitingNode node;
  node.lost();
  node.network.answerAll();
  auto expected = node.others;
  std::ranges::rotate(expected, std::ranges::find(expected, kSelf + 1));
  CHECK(node.network.dialled == expected);
}

TEST_CASE("a worker whose link has ended is not lost before it has been dialled again") {
  WaitingNode node;
  node.agent.lostAmong({kSelf - 1});
  node.network.answer(kSelf - 1);
  node.network.cut(kSelf - 1);
  node.timer->advance(1s);
  CHECK(node.lost().empty());  // it is the last one in the queue
  node.timer->advance(1s);
  CHECK(node.lost().empty());
  node.network.answerAll();
  CHECK(node.network.dialled.back() == kSelf - 1);
  node.timer->advance(1s);
  CHECK(node.lost().empty());
}

TEST_CASE("a worker that could not be dialled again is lost after a while") {
  WaitingNode node;
  node.lost();
  node.network.refuse(kSelf + 2);
  CHECK(node.dialled() == kMaxOpenProbes + 1);
  CHECK(node.lost().empty());
  node.timer->advance(1s);
  CHECK(node.lost() == Ids{kSelf + 2});
  node.network.answerAll();  // it has been dialled once more
  CHECK(node.lost().empty());
}

TEST_CASE("workers that do not answer hold up the probes of others only for a while, and are lost when silent") {
  WaitingNode node;
  node.lost();
  const auto slow = node.network.dialled;
  REQUIRE(slow.size() == kMaxOpenProbes);
  node.timer->advance(kLinkRound);
  node.lost();
  CHECK(node.dialled() == kMaxOpenProbes);
  node.timer->advance(kLinkRound);
  CHECK(node.dialled() == 2 * kMaxOpenProbes);
  for (const auto worker : Ids(node.network.dialled.begin() + kMaxOpenProbes, node.network.dialled.end())) {
    node.network.answer(worker);
  }
  CHECK(node.lost().empty());
  node.network.answer(slow[0]);
  for (int i = 0; i < 2; ++i) {
    node.timer->advance(kLinkRound);
    for (const auto worker : Ids(node.network.dialled.begin() + kMaxOpenProbes, node.network.dialled.end())) {
      if (node.network.unanswered.contains(worker)) node.network.answer(worker);
    }
    node.lost();
  }
  CHECK(node.lost() == Ids(slow.begin() + 1, slow.end()));
}

TEST_CASE("a node that ends dials no more of the workers for which it has waited") {
  WaitingNode node;
  node.lost();
  node.agent.beginEnd(0s);
  node.agent.leave(0s);
  node.network.answerAll();
  CHECK(node.dialled() == kMaxOpenProbes);
}

TEST_CASE("a worker that has left the group is lost among those that are waited for") {
  WaitingNode node;
  node.agent.directory().remove(kSelf + 1);
  node.lost();
  node.timer->advance(1s);
  CHECK(node.lost() == Ids{kSelf + 1});
}
