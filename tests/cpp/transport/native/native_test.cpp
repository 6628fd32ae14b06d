// What only the native transport has: its addresses and ways, what it costs when idle, peers in other processes.

#include <barrier>
#include <ctime>
#include <list>
#include <random>
#include <thread>

#include "needs_futex_waiter.h"
#include "outcomes.h"
#include "transport/child_process.h"
#include "transport/kinds.h"
#include "transport/native/address.h"
#include "transport/registry.h"
#include "transport/witness.h"

using namespace torchrpc;
using namespace torchrpc::native;
using namespace torchrpc::test;

namespace {

std::string textOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    return error.text();
  }
  return "";
}

struct Nobody : ConnectionHandler {
  void onFrame(Frame) override {}
  void onClosed(const Error&) override {}
};

double cpuSeconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace

TEST_CASE("a native address survives its text") {
  const Address address{0xab, "10.0.0.1:4242", "boot.1", "torchrpc-1"};
  CHECK(address.text() == "native:id=ab;tcp=10.0.0.1:4242;host=boot.1;unix=torchrpc-1");
  CHECK(Address::parse(address.text()).text() == address.text());
  CHECK(Address::parse("native:id=1;tcp=[::1]:2").text() == "native:id=1;tcp=[::1]:2");
  CHECK(Address::parse("native:id=1;tcp=[::1]:2;later=x").tcp == "[::1]:2");
}

TEST_CASE("what is no native address is refused") {
  for (const char* text :
       {"native:", "native:id=x;tcp=1.2.3.4:5", "native:id=1", "native:id=1;tcp=localhost:1", "native:id=1;tcp=1.2.3.4",
        "native:id=1;tcp=1.2.3.4:5;host=h", "native:id=1;tcp=1.2.3.4:5;unix=u", "native:;"}) {
    CAPTURE(text);
    CHECK_THAT(textOf([&] { Address::parse(text); }), Catch::Contains("not the address"));
  }
}

TEST_CASE("workers of one host share memory, others meet over TCP") {
  Pair<NativeShm> pair;
  CHECK(pair.a->describe() == "native(shm,tcp)");
  CHECK_THAT(pair.connect(pair.witness())->describe(), Catch::Contains("unix"));
  pair.accepted(0);
  auto address = Address::parse(pair.address);
  address.host = "another-boot.1";
  auto far = pair.a->connect(address.text(), "bob", pair.witness());
  CHECK_THAT(far->describe(), Catch::Contains("tcp 127.0.0.1:"));
  pair.send(*far, headOnly("hello"));
  CHECK(pair.accepted(1).witness->takeFrame().head == "hello");
}

TEST_CASE("one side with shared memory and one without meet over the socket") {
  struct Mixed {
    bool next = false;
    std::unique_ptr<Transport> make(Limits limits) {
      return makeNative({.shared_memory = std::exchange(next, true)}, limits);
    }
  };
  Pair<Mixed> pair;
  auto connection = pair.connect(pair.witness());
  pair.send(*connection, {"hello", {filled(3 << 20, 'x')}});
  CHECK(isFilled(pair.accepted().witness->takeFrame().segments.at(0), 3 << 20, 'x'));
}

TEST_CASE("an idle node uses no processor time") {
  Pair<NativeShm> pair;
  auto connection = pair.connect(pair.witness());
  for (int i = 0; i < 100; ++i) pair.send(*connection, headOnly("busy"));
  REQUIRE(pair.accepted().witness->awaitFrames(100));
  const auto before = cpuSeconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  CHECK(cpuSeconds() - before < 0.05);
}

TEST_CASE("child: a native peer that waits to be killed", "[.child]") {
  auto transport = makeNative({}, {});
  auto connection = transport->connect(ChildProcess::argument(), "parent", std::make_shared<Nobody>());
  connection->send(headOnly("I live"), [](Status) {});
  for (;;) pause();
}

TEMPLATE_TEST_CASE("a native peer that is killed is heard of", "", NativeTcp, NativeUnix, NativeShm, NativeRings) {
  Pair<TestType> pair;
  ChildProcess child("child: a native peer that waits to be killed", pair.address);
  CHECK(pair.accepted().witness->takeFrame().head == "I live");
  child.kill(SIGKILL);
  CHECK(pair.accepted().witness->awaitClosed().code() == ErrorCode::kWorkerLost);
}

TEST_CASE("child: a native peer that echoes large tensors", "[.child]") {
  auto transport = makeNative({}, {});
  struct Echo : ConnectionHandler {
    std::shared_ptr<Connection> connection;
    std::atomic<bool> over{false};
    void onFrame(Frame frame) override {
      connection->send(std::move(frame), [](const Status&) {});
    }
    void onClosed(const Error&) override {
      over = true;
      over.notify_one();
    }
  };
  auto echo = std::make_shared<Echo>();
  echo->connection = transport->connect(ChildProcess::argument(), "parent", echo);
  echo->connection->send(headOnly("I live"), [](Status) {});
  echo->over.wait(false);
}

TEST_CASE("tensors of any size go to another process and back through shared memory") {
  Pair<NativeShm> pair;
  ChildProcess child("child: a native peer that echoes large tensors", pair.address);
  auto bob = pair.accepted();
  CHECK(bob.witness->takeFrame().head == "I live");
  const std::vector<size_t> sizes = {1, 5'000, 300'000, 20 << 20};
  for (char i = 1; i <= 4; ++i) pair.send(*bob.connection, {"h", {filled(sizes[i - 1], i), filled(sizes[4 - i], i)}});
  for (char i = 1; i <= 4; ++i) {
    auto frame = bob.witness->takeFrame();
    CHECK(isFilled(frame.segments.at(0), sizes[i - 1], i));
    CHECK(isFilled(frame.segments.at(1), sizes[4 - i], i));
  }
  bob.connection->close();
  CHECK(child.wait() == 0);
}

// ---- assistants ----

namespace {
thread_local bool assists = false;
}

TEMPLATE_TEST_CASE("threads that assist bring frames, in order, and lose none", "", NativeTcp, NativeUnix, NativeShm) {
  constexpr int kFrames = 20'000, kBurst = 50;
  Pair<TestType> pair;
  auto connection = pair.connect(pair.witness());
  auto& witness = *pair.accepted().witness;
  std::atomic<int> come{0}, by_assistants{0}, out_of_order{0};
  witness.hook = [&](const Frame& frame) {
    out_of_order += frame.head != std::to_string(come);
    by_assistants += assists;
    ++come;
    come.notify_all();
  };
  std::atomic<bool> over{false};
  std::vector<std::jthread> assistants;
  for (int i = 0; i < 2; ++i) {
    assistants.emplace_back([&] {
      assists = true;
      // As a caller does: looks for a while, then sleeps until there is news.
      for (int seen = come; !over; seen = come) {
        pair.b->poll([&] { return come != seen; });
        come.wait(seen);
      }
    });
  }
  int sent = 0;
  const auto send = [&] { pair.send(*connection, headOnly(std::to_string(sent++))); };
  while (sent < kFrames) {
    send();
    // Now and then all of them sleep.
    if (sent % kBurst == 1) std::this_thread::sleep_for(std::chrono::microseconds(sent % 300));
  }
  // While the machine has more work than cores nobody looks.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (by_assistants == 0 && std::chrono::steady_clock::now() < deadline) {
    send();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  over = true;
  send();
  CHECK(witness.awaitFrames(sent));
  assistants.clear();
  CHECK(out_of_order == 0);
  CHECK(by_assistants > 0);
}

TEST_CASE("whoever assists gives the loop its turn whatever comes") {
  Pair<NativeShm> pair;
  auto connection = pair.connect(pair.witness());
  const auto accepted = pair.accepted();
  std::atomic<bool> over{false};
  std::atomic<int> queued{0};
  std::jthread flood([&] {
    while (!over) {
      if (queued > 64) continue;
      ++queued;
      connection->send(headOnly("more"), [&](const Status&) { --queued; });
    }
  });
  REQUIRE(accepted.witness->awaitFrames(1));
  std::jthread assistant([&] {
    while (!over) pair.b->poll([] { return false; });  // returns, or the test hangs
  });
  // Only the loop can accept connections.
  for (size_t i = 1; i <= 20; ++i) {
    pair.connect(pair.witness());
    pair.accepted(i);
  }
  over = true;
  flood.join();
  while (queued > 0) std::this_thread::yield();
}

TEST_CASE("a transport can be closed while threads assist, and assisting a closed one returns") {
  Pair<NativeShm> pair;
  auto connection = pair.connect(pair.witness());
  pair.send(*connection, headOnly("hello"));
  REQUIRE(pair.accepted().witness->awaitFrames(1));
  std::atomic<bool> over{false};
  std::jthread assistant([&] {
    while (!over) pair.b->poll([&] { return over.load(); });
  });
  pair.b->close();
  pair.b->poll([] { return false; });
  over = true;
}

// ---- sleepers ----

namespace {

/// A thread that waits for frames as callers do: looks, then sleeps where they come in.
class Listener {
 public:
  Listener(Transport& transport, std::atomic<int>& come, bool preemptible)
      : thread_([this, &transport, &come, preemptible] {
          current = this;
          for (int seen = come; !over_; seen = come) {
            const auto news = [&] { return come != seen || over_; };
            transport.poll(news);
            while (!news()) {
              transport.sleep(news, futex_waiter_, kNever, preemptible);
              if (!news()) ++sent_away;
              std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
          }
        }) {}
  ~Listener() {
    over_ = true;
    futex_waiter_.ring();
  }
  void tell() { futex_waiter_.ring(); }

  /// The listener that this thread is.
  static thread_local Listener* current;
  std::atomic<int> brought{0};
  std::atomic<int> sent_away{0};  ///< to sleep elsewhere

 private:
  std::atomic<bool> over_{false};
  FutexWaiter futex_waiter_;
  std::jthread thread_;
};

thread_local Listener* Listener::current = nullptr;

/// Frames to listeners, one after another.
struct Listening {
  Listening() {
    witness.hook = [this](const Frame&) {
      if (Listener::current) ++Listener::current->brought;
      ++come;
      for (auto& listener : listeners) listener.tell();
    };
    send();
  }
  ~Listening() { listeners.clear(); }

  Listener& listen(bool preemptible = false) { return listeners.emplace_back(*pair.b, come, preemptible); }
  void send() {
    pair.send(*connection, headOnly("frame"));
    REQUIRE(witness.awaitFrames(++sent));
  }
  /// Whether some frame, each sent when all have fallen asleep, is brought by that listener.
  bool isBroughtBy(Listener& listener) {
    const int before = listener.brought;
    return eventually([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      send();
      return listener.brought > before;
    });
  }

  Pair<NativeShm> pair;
  std::shared_ptr<Connection> connection = pair.connect(pair.witness());
  Witness& witness = *pair.accepted().witness;
  std::atomic<int> come{0};
  int sent = 0;
  std::list<Listener> listeners;
};

}  // namespace

TEST_CASE("threads that sleep in the loop's place miss no frame") {
  NEEDS_ALARM;
  constexpr int kFrames = 10'000;
  Listening frames;
  frames.listen(/*preemptible=*/true);
  frames.listen();
  frames.listen();
  // One at a time: nothing that comes later wakes who has missed one.
  while (frames.sent < kFrames) {
    frames.send();
    if (frames.sent % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(frames.sent % 400));
  }
}

TEST_CASE("frames are not missed when sleepers leave, or are replaced, while others look") {
  NEEDS_ALARM;
  constexpr int kRounds = 10'000;
  Listening frames;
  std::barrier round(4);
  std::atomic<bool> over{false};
  // In each round they come together, and nobody who could find what another has missed stays until its end.
  const auto everyRound = [&](unsigned seed, auto visit) {
    return std::jthread([&, visit, random = std::minstd_rand(seed)]() mutable {
      while (round.arrive_and_wait(), !over) {
        const auto begin = deadlineAfter(std::chrono::microseconds(random() % 100));
        while (std::chrono::steady_clock::now() < begin) std::this_thread::yield();
        visit(begin + std::chrono::microseconds(random() % 100));
        round.arrive_and_wait();
      }
    });
  };
  const auto late = [](TimePoint latest) { return [latest] { return std::chrono::steady_clock::now() >= latest; }; };
  const auto idle = everyRound(1, [&](TimePoint latest) {
    FutexWaiter waiter;
    frames.pair.b->sleep(late(latest), waiter, latest, /*preemptible=*/true);
  });
  // In every other round it stays until the frame has come: nobody but itself finds then what it has missed.
  std::atomic<int> rounds{0};
  FutexWaiter has_come;
  const auto caller = everyRound(2, [&](TimePoint latest) {
    const bool stays = rounds % 2 == 0;
    const auto come = [&] { return frames.come > rounds + 1; };  // one came before the first
    frames.pair.b->sleep(stays ? std::function<bool()>(come) : late(latest), has_come, stays ? kNever : latest, false);
  });
  const auto looks = everyRound(3, [&](TimePoint latest) { frames.pair.b->poll(late(latest)); });
  std::minstd_rand random(4);
  for (int i = 0; i < kRounds; ++i) {
    round.arrive_and_wait();
    const auto then = deadlineAfter(std::chrono::microseconds(random() % 200));
    while (std::chrono::steady_clock::now() < then) std::this_thread::yield();
    frames.send();
    has_come.ring();
    round.arrive_and_wait();
    ++rounds;
  }
  over = true;
  round.arrive_and_wait();
}

TEST_CASE("who sleeps in the loop's place brings what comes, and gives way to others") {
  NEEDS_ALARM;
  Listening frames;
  auto& idle = frames.listen(/*preemptible=*/true);
  CHECK(frames.isBroughtBy(idle));
  const int before = idle.sent_away;
  auto& caller = frames.listen();
  CHECK(frames.isBroughtBy(caller));
  CHECK(eventually([&] { return idle.sent_away > before; }));
}

TEST_CASE("a transport can be closed while a thread sleeps in its loop's place") {
  NEEDS_ALARM;
  Pair<NativeShm> pair;
  auto connection = pair.connect(pair.witness());
  pair.send(*connection, headOnly("hello"));
  auto& witness = *pair.accepted().witness;
  REQUIRE(witness.awaitFrames(1));
  FutexWaiter waiter;
  std::atomic<bool> closed{false};
  std::jthread sleeper([&] {
    // It may be sent away while the loop has its turn.
    while (!closed) pair.b->sleep([&] { return closed.load(); }, waiter, kNever, /*preemptible=*/false);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  pair.b->close();
  CHECK(witness.awaitClosed().code() == ErrorCode::kShutdown);
  closed = true;
  waiter.ring();
  sleeper.join();
  pair.b->sleep([] { return false; }, waiter, kNever, /*preemptible=*/false);
}

// ---- the choice ----

TEST_CASE("the transport is native unless somebody says otherwise") {
  ::unsetenv("TORCHRPC_TRANSPORT");
  CHECK_THAT(torchrpc::makeTransport({.host = "127.0.0.1"})->describe(), Catch::StartsWith("native("));
  CHECK_THAT(torchrpc::makeTransport({.kind = "auto", .host = "127.0.0.1"})->describe(), Catch::StartsWith("native("));
  CHECK_THAT(
      torchrpc::makeTransport({.transports = {{"native"}}, .host = "127.0.0.1"})->describe(),
      Catch::StartsWith("native("));
}

TEST_CASE("a transport that does not exist is refused with those that do") {
  CHECK_THAT(
      textOf([] { torchrpc::makeTransport({.kind = "pigeon"}); }),
      Catch::Contains("pigeon") && Catch::Contains("native") && Catch::Contains("tensorpipe"));
  ::setenv("TORCHRPC_TRANSPORT", "pigeon", 1);
  CHECK_THAT(textOf([] { torchrpc::makeTransport({}); }), Catch::Contains("TORCHRPC_TRANSPORT"));
  ::unsetenv("TORCHRPC_TRANSPORT");
}

TEST_CASE("TCP can be had within a host, too") {
  CHECK(torchrpc::makeTransport({.kind = "tcp", .host = "127.0.0.1"})->describe() == "native(tcp)");
}

TEST_CASE("how long to spin is a number") {
  for (const char* text : {"-1", "1ms", "x"}) {
    ::setenv("TORCHRPC_SPIN_US", text, 1);
    CHECK_THAT(textOf([] { torchrpc::makeTransport({.host = "127.0.0.1"}); }), Catch::Contains("TORCHRPC_SPIN_US"));
  }
  ::setenv("TORCHRPC_SPIN_US", "0", 1);
  CHECK_NOTHROW(torchrpc::makeTransport({.host = "127.0.0.1"}));
  ::unsetenv("TORCHRPC_SPIN_US");
}

TEST_CASE("a worker with another transport is named with the remedy") {
  auto native = makeNative({}, {});
  CHECK_THAT(
      textOf([&] { native->connect("tensorpipe:uv://10.0.0.1:1#uv:*", "bob", std::make_shared<Nobody>()); }),
      Catch::Contains("tensorpipe") && Catch::Contains("TORCHRPC_TRANSPORT"));
}

#ifndef TORCHRPC_WITHOUT_TENSORPIPE
TEST_CASE("TensorPipe is used where it is asked for, by whichever way") {
  CHECK(torchrpc::makeTransport({.kind = "tensorpipe", .host = "127.0.0.1"})->describe().starts_with("tensorpipe("));
  CHECK(
      torchrpc::makeTransport({.transports = {{"uv"}}, .host = "127.0.0.1"})->describe().starts_with("tensorpipe(uv"));
  CHECK(torchrpc::makeTransport({.channels = {{"basic"}}, .host = "127.0.0.1"})->describe().starts_with("tensorpipe("));
  ::setenv("TORCHRPC_TRANSPORT", "tensorpipe", 1);
  CHECK(torchrpc::makeTransport({.host = "127.0.0.1"})->describe().starts_with("tensorpipe("));
  // What a script says in its options goes before the environment.
  CHECK(torchrpc::makeTransport({.kind = "native", .host = "127.0.0.1"})->describe().starts_with("native("));
  ::unsetenv("TORCHRPC_TRANSPORT");
  CHECK_THAT(
      textOf([] { torchrpc::makeTransport({.kind = "native", .transports = {{"uv"}}}); }),
      Catch::Contains("_transports"));
}
#else
TEST_CASE("asking a build without TensorPipe for it is answered with the remedy") {
  CHECK_THAT(textOf([] { makeTransport({.kind = "tensorpipe"}); }), Catch::Contains("built without TensorPipe"));
}
#endif
