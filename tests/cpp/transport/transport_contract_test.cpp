// The contract of transport.h, on every transport: the delivery of frames. transport_closing_test.cpp has the other
// half.

#include <thread>

#include "transport/transports_under_test.h"
#include "transport/witness.h"

using namespace torchrpc;
using namespace torchrpc::test;

CONTRACT("ten thousand small frames arrive whole and in order") {
  Pair<TestType> pair;
  auto connection = pair.connect(pair.witness());
  for (int i = 0; i < 10'000; ++i) pair.send(*connection, headOnly(std::to_string(i)));
  auto bob = pair.accepted().witness;
  REQUIRE(bob->awaitFrames(10'000));
  int wrong = 0;
  for (int i = 0; i < 10'000; ++i) wrong += bob->takeFrame().head != std::to_string(i);
  CHECK(wrong == 0);
}

CONTRACT("frames of 64 MiB arrive whole") {
  Pair<TestType> pair;
  auto connection = pair.connect(pair.witness());
  constexpr size_t kBytes = 64 << 20;
  std::vector<std::shared_ptr<Sent>> sent;
  for (char i = 1; i <= 3; ++i) sent.push_back(pair.send(*connection, {"large", {filled(kBytes, i)}}));
  for (char i = 1; i <= 3; ++i) {
    auto frame = pair.accepted().witness->takeFrame();
    REQUIRE(frame.segments.size() == 1);
    CHECK(isFilled(frame.segments[0], kBytes, i));
  }
  for (auto& one : sent) CHECK_FALSE(pair.outcome(one));
}

CONTRACT("heads and segments of any size arrive together and in order") {
  Pair<TestType> pair;
  auto connection = pair.connect(pair.witness());
  const std::vector<size_t> sizes = {0, 1, 5'000, 32 << 10, (32 << 10) + 1, 1 << 20};
  for (size_t head : sizes) {
    Frame frame{std::string(head, 'h'), {}};
    for (size_t segment : sizes) frame.segments.push_back(filled(segment, 's'));
    pair.send(*connection, frame);
    pair.send(*connection, headOnly(std::string(head, 'n')));
  }
  auto bob = pair.accepted().witness;
  for (size_t head : sizes) {
    CAPTURE(head);
    auto full = bob->takeFrame();
    CHECK(full.head == std::string(head, 'h'));
    REQUIRE(full.segments.size() == sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) CHECK(isFilled(full.segments[i], sizes[i], 's'));
    auto bare = bob->takeFrame();
    CHECK(bare.head == std::string(head, 'n'));
    CHECK(bare.segments.empty());
  }
}

CONTRACT("a frame may consist of many zero-size segments") {
  Pair<TestType> pair;
  auto connection = pair.connect(pair.witness());
  pair.send(*connection, {"h", std::vector<Segment>(100, filled(0, 0))});
  CHECK(pair.accepted().witness->takeFrame().segments.size() == 100);
}

CONTRACT("part of a storage is sent as that part") {
  Pair<TestType> pair;
  auto connection = pair.connect(pair.witness());
  auto segment = filled(10'000, 'x');
  static_cast<char*>(segment.mutableData())[4'000] = 'y';
  segment.offset = 4'000;
  segment.bytes = 1;
  pair.send(*connection, {"h", {segment}});
  auto frame = pair.accepted().witness->takeFrame();
  REQUIRE(frame.segments.size() == 1);
  CHECK(isFilled(frame.segments[0], 1, 'y'));
}

CONTRACT("a frame that arrives shares no memory with the frame that was sent") {
  Pair<TestType> pair;
  auto connection = pair.connect(pair.witness());
  auto segment = filled(5'000, 'a');
  CHECK_FALSE(pair.outcome(pair.send(*connection, {"h", {segment}})));
  std::memset(segment.mutableData(), 'b', 5'000);
  auto frame = pair.accepted().witness->takeFrame();
  // A frame may still be under way when its memory is free again, so only the addresses are certain to differ.
  CHECK(frame.segments[0].data() != segment.data());
  std::memset(frame.segments[0].mutableData(), 'c', 5'000);
  CHECK(isFilled(segment, 5'000, 'b'));
}

CONTRACT("both sides send over one connection") {
  Pair<TestType> pair;
  pair.on_accept = [&](const std::shared_ptr<Connection>& connection, Witness& bob) {
    bob.hook = [&, connection](Frame& frame) { pair.send(*connection, {"re " + frame.head, frame.segments}); };
  };
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  for (int i = 0; i < 200; ++i) pair.send(*connection, {std::to_string(i), {filled(10'000, static_cast<char>(i))}});
  for (int i = 0; i < 200; ++i) {
    auto frame = alice->takeFrame();
    CHECK(frame.head == "re " + std::to_string(i));
    CHECK(isFilled(frame.segments.at(0), 10'000, static_cast<char>(i)));
  }
}

CONTRACT("frames of concurrent senders all arrive, each sender's in order") {
  Pair<TestType> pair;
  auto connection = pair.connect(pair.witness());
  constexpr int kThreads = 4, kFrames = 500;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kFrames; ++i) pair.send(*connection, headOnly(std::to_string(t) + " " + std::to_string(i)));
    });
  }
  for (auto& thread : threads) thread.join();
  auto bob = pair.accepted().witness;
  REQUIRE(bob->awaitFrames(kThreads * kFrames));
  std::vector<int> next(kThreads, 0);
  for (int i = 0; i < kThreads * kFrames; ++i) {
    const auto head = bob->takeFrame().head;
    auto& expected = next.at(head[0] - '0');
    CHECK(head.substr(2) == std::to_string(expected));
    ++expected;
  }
}

CONTRACT("a frame too large to send is refused and the connection stays") {
  Limits small;
  small.head_bytes = 1'000;
  small.segment_bytes = 2'000;
  small.tensors = 3;
  Pair<TestType> pair(small);
  auto connection = pair.connect(pair.witness());
  std::vector<Frame> refused;
  refused.push_back(headOnly(std::string(1'001, 'x')));
  refused.push_back({"h", {filled(2'001, 'x')}});
  refused.push_back({"h", std::vector<Segment>(4, filled(1, 'x'))});
  for (auto& frame : refused) {
    const auto error = pair.outcome(pair.send(*connection, std::move(frame)));
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kFrameTooLarge);
  }
  pair.send(*connection, {std::string(1'000, 'x'), std::vector<Segment>(3, filled(2'000, 'x'))});
  CHECK(pair.accepted().witness->takeFrame().head.size() == 1'000);
}

CONTRACT("a frame larger than the receiver allows ends the connection") {
  Limits small;
  small.head_bytes = 1'000;
  small.segment_bytes = 2'000;
  small.tensors = 3;
  for (const auto& frame :
       {headOnly(std::string(1'001, 'x')), headOnly(std::string(100'000, 'x')), Frame{"h", {filled(2'001, 'x')}},
        Frame{"h", std::vector<Segment>(4, filled(1, 'x'))}}) {
    Pair<TestType> pair({}, small);
    auto alice = pair.witness();
    auto connection = pair.connect(alice);
    pair.send(*connection, frame);
    CHECK(pair.accepted().witness->awaitClosed().code() == ErrorCode::kFrameTooLarge);
    CHECK(pair.accepted().witness->frameCount() == 0);
    CHECK(alice->awaitClosed().code() == ErrorCode::kWorkerLost);
  }
}

CONTRACT("memory of a sent frame whose deleter waits holds up neither the loop nor a sender") {
  Pair<TestType> pair;
  pair.on_accept = [&](const std::shared_ptr<Connection>& connection, Witness& bob) {
    bob.hook = [connection](Frame& frame) { connection->send(headOnly("re " + frame.head), [](const Status&) {}); };
  };
  std::atomic<bool> on_loop{false}, answered{false}, freed{false};
  constexpr size_t kBytes = 20'000;
  std::vector<char> memory(kBytes * sizeof(float), 'm');
  // The memory is freed when the peer has answered a later frame.
  const auto free = [&](void*) {
    on_loop = pair.a->inLoop();
    if (!on_loop) pair.log.await([&] { return answered.load(); });
    pair.log.write([&] { freed = true; });
  };
  auto alice = pair.witness();
  std::shared_ptr<Connection> connection;
  alice->hook = [&](Frame& frame) {
    if (frame.head == "re first") {
      Frame foreign = headOnly("foreign");  // has the only reference
      foreign.segments.push_back({at::from_blob(memory.data(), {kBytes}, free).storage(), 0, kBytes});
      pair.send(*connection, std::move(foreign));
      pair.send(*connection, headOnly("later"));
    } else if (frame.head == "re later") {
      pair.log.write([&] { answered = true; });
    }
  };
  connection = pair.connect(alice);
  pair.send(*connection, headOnly("first"));
  CHECK(alice->awaitFrames(3));
  CHECK(answered);
  CHECK(pair.log.await([&] { return freed.load(); }));
  CHECK_FALSE(on_loop);
}

CONTRACT("an address of another transport is an invalid argument") {
  Pair<TestType> pair;
  for (const char* address :
       {"", "nonsense", "loopback:", "loopback:x", "tensorpipe:", "tensorpipe:uv://", "tensorpipe:uv://127.0.0.1:1",
        "tensorpipe:uv://nowhere.invalid:1#uv:*"}) {
    CAPTURE(address);
    struct Nobody : ConnectionHandler {
      void onFrame(Frame&&) override {}
      void onClosed(const Error&) override {}
    };
    try {
      pair.a->connect(address, "bob", std::make_shared<Nobody>());
      FAIL("connected");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kInvalidArgument);
    }
  }
}

CONTRACT("a transport may connect to itself") {
  Pair<TestType> pair;
  auto self = std::make_shared<Witness>(pair.log, *pair.b);
  auto connection = pair.b->connect(pair.address, "bob", self);
  pair.send(*connection, headOnly("to myself"));
  CHECK(pair.accepted().witness->takeFrame().head == "to myself");
}

CONTRACT("a connection outlives the last reference to it") {
  Pair<TestType> pair;
  auto alice = pair.witness();
  pair.send(*pair.connect(alice), headOnly("hello"));
  pair.accepted().witness->takeFrame();
  pair.send(*pair.accepted().connection, headOnly("welcome"));
  CHECK(alice->takeFrame().head == "welcome");
}

CONTRACT("only a thread inside a handler is in the loop") {
  Pair<TestType> pair;
  CHECK_FALSE(pair.a->inLoop());
  auto alice = pair.witness();
  std::atomic<bool> others_loop{false};
  alice->hook = [&](Frame&) { others_loop = pair.b->inLoop(); };
  auto connection = pair.connect(alice);
  pair.send(*pair.accepted().connection, headOnly("hello"));
  REQUIRE(alice->awaitFrames(1));
  CHECK_FALSE(others_loop);
  CHECK_FALSE(pair.a->inLoop());
}

CONTRACT("many nodes may send to each other at once") {
  constexpr int kNodes = 10, kFrames = 20;
  TestType kind;
  CallbackLog log;
  std::vector<std::unique_ptr<Transport>> nodes;
  std::vector<std::string> addresses;
  std::deque<std::shared_ptr<Witness>> accepted, opened;
  for (int i = 0; i < kNodes; ++i) {
    nodes.push_back(kind.make({}));
    addresses.push_back(nodes[i]->listen([&, i](std::shared_ptr<Connection> connection) {
      auto witness = std::make_shared<Witness>(log, *nodes[i]);
      witness->hook = [connection](Frame& frame) { connection->send(Frame(frame), [](const Status&) {}); };
      log.write([&] { accepted.push_back(witness); });
      return witness;
    }));
  }
  for (int i = 0; i < kNodes; ++i) {
    for (int j = 0; j < kNodes; ++j) {
      opened.push_back(std::make_shared<Witness>(log, *nodes[i]));
      auto connection = nodes[i]->connect(addresses[j], "bob", opened.back());
      for (int k = 0; k < kFrames; ++k) connection->send(headOnly(std::to_string(k)), [](const Status&) {});
    }
  }
  for (auto& witness : opened) {
    REQUIRE(witness->awaitFrames(kFrames));
    for (int k = 0; k < kFrames; ++k) CHECK(witness->takeFrame().head == std::to_string(k));
  }
  for (auto& node : nodes) node->close();
  for (const auto& violation : log.violations) FAIL_CHECK(violation);
  CHECK(log.made == log.expected);
}
