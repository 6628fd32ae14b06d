// The contract of transport.h, on every transport: the end of connections.

#include <thread>

#include "transport/transports_under_test.h"
#include "transport/witness.h"

using namespace torchrpc;
using namespace torchrpc::test;

CONTRACT("a handler may close its connection from inside onFrame") {
  Pair<TestType> pair;
  auto alice = pair.witness();
  std::shared_ptr<Connection> connection;
  pair.on_accept = [&](const std::shared_ptr<Connection>& accepted, Witness& bob) {
    bob.hook = [accepted](Frame&) { accepted->close(); };
  };
  connection = pair.connect(alice);
  pair.send(*connection, headOnly("1"));
  pair.send(*connection, headOnly("2"));
  CHECK(pair.accepted().witness->awaitClosed().code() == ErrorCode::kShutdown);
  CHECK(pair.accepted().witness->frameCount() <= 2);
  CHECK(alice->awaitClosed().code() == ErrorCode::kWorkerLost);
}

CONTRACT("a handler may send from inside onClosed") {
  Pair<TestType> pair;
  auto alice = pair.witness();
  std::shared_ptr<Connection> connection;
  std::shared_ptr<Sent> late;
  alice->closed_hook = [&] { late = pair.send(*connection, headOnly("late")); };
  connection = pair.connect(alice);
  connection->close();
  alice->awaitClosed();
  CHECK(pair.outcome(late));
}

CONTRACT("closing with sends pending completes each of them once") {
  Pair<TestType> pair;
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  std::vector<std::shared_ptr<Sent>> sent;
  for (int i = 0; i < 50; ++i) sent.push_back(pair.send(*connection, {"h", {filled(1 << 20, 'p')}}));
  connection->close();
  connection->close();
  for (int i = 0; i < 10; ++i) sent.push_back(pair.send(*connection, headOnly("after")));
  CHECK(alice->awaitClosed().code() == ErrorCode::kShutdown);
  for (size_t i = 50; i < sent.size(); ++i) CHECK(pair.outcome(sent[i]));
  // The pair checks at its end that the first fifty complete, too, with or without an error.
}

CONTRACT("a peer that closes is named, and sending to it fails") {
  Pair<TestType> pair;
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  pair.accepted().connection->close();
  const auto reason = alice->awaitClosed();
  CHECK(reason.code() == ErrorCode::kWorkerLost);
  CHECK(reason.worker() == "bob");
  CHECK_THAT(reason.text(), Catch::Contains("bob"));
  const auto error = pair.outcome(pair.send(*connection, headOnly("hello?")));
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kWorkerLost);
  CHECK(pair.accepted().witness->awaitClosed().code() == ErrorCode::kShutdown);
}

CONTRACT("connecting to a node that has ended is reported by onClosed") {
  Pair<TestType> pair;
  pair.b->close();
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  auto sent = pair.send(*connection, headOnly("anybody there?"));
  const auto reason = alice->awaitClosed();
  CHECK(reason.code() == ErrorCode::kWorkerLost);
  CHECK(reason.worker() == "bob");
  CHECK(pair.outcome(sent));
}

CONTRACT("an acceptor may refuse a connection") {
  Pair<TestType> pair;
  pair.refuse = true;
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  CHECK(alice->awaitClosed().code() == ErrorCode::kWorkerLost);
}

CONTRACT("closing a transport ends all its connections, for both sides") {
  Pair<TestType> pair;
  std::vector<std::shared_ptr<Witness>> alices;
  for (int i = 0; i < 5; ++i) {
    alices.push_back(pair.witness());
    auto connection = pair.connect(alices.back());
    pair.send(*connection, headOnly("hello"));
    REQUIRE(pair.accepted(i).witness->awaitFrames(1));
  }
  pair.a->close();
  pair.a->close();
  for (auto& alice : alices) CHECK(alice->awaitClosed().code() == ErrorCode::kShutdown);
  for (int i = 0; i < 5; ++i) CHECK(pair.accepted(i).witness->awaitClosed().code() == ErrorCode::kWorkerLost);
}

CONTRACT("after close, connecting throws and sending fails at once") {
  Pair<TestType> pair;
  auto connection = pair.connect(pair.witness());
  pair.a->close();
  auto sent = pair.send(*connection, headOnly("late"));
  CHECK(sent->done);
  CHECK(sent->error);
  struct Nobody : ConnectionHandler {
    void onFrame(Frame&&) override {}
    void onClosed(const Error&) override {}
  };
  try {
    pair.a->connect(pair.address, "bob", std::make_shared<Nobody>());
    FAIL("connected");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kShutdown);
  }
}

CONTRACT("closing while threads send and connect loses no callback") {
  Pair<TestType> pair;
  auto connection = pair.connect(pair.witness());
  std::atomic<bool> stop{false};
  std::atomic<int> rounds{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      while (!stop) {
        pair.send(*connection, {"h", {filled(5'000, 'c')}});
        ++rounds;
      }
    });
  }
  while (rounds < 100) std::this_thread::yield();
  pair.b->close();
  pair.a->close();
  stop = true;
  for (auto& thread : threads) thread.join();
}
