// The native transport beyond the contract: addresses, routes, its cost when idle, peers in other processes, threads
// that poll and park.

#include <barrier>
#include <ctime>
#include <list>
#include <random>
#include <thread>

#include "needs_futex_waiter.h"
#include "outcomes.h"
#include "transport/child_process.h"
#include "transport/native/address.h"
#include "transport/registry.h"
#include "transport/transports_under_test.h"
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

struct QuietHandler : ConnectionHandler {
  void onFrame(Frame&&) override {}
  void onClosed(const Error&) override {}
};

double cpuSeconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace

TEST_CASE("a native address can be parsed from its text") {
  const Address address{0xab, "10.0.0.1:4242", "boot.1", "torchrpc-1"};
  CHECK(address.text() == "native:id=ab;tcp=10.0.0.1:4242;host=boot.1;unix=torchrpc-1");
  CHECK(Address::parse(address.text()).text() == address.text());
  CHECK(Address::parse("native:id=1;tcp=[::1]:2").text() == "native:id=1;tcp=[::1]:2");
  CHECK(Address::parse("native:id=1;tcp=[::1]:2;later=x").tcp == "[::1]:2");
}

TEST_CASE("text that is not a native address is refused") {
  for (const char* text :
       {"native:", "native:id=x;tcp=1.2.3.4:5", "native:id=1", "native:id=1;tcp=localhost:1", "native:id=1;tcp=1.2.3.4",
        "native:id=1;tcp=1.2.3.4:5;host=h", "native:id=1;tcp=1.2.3.4:5;unix=u", "native:;"}) {
    CAPTURE(text);
    CHECK_THAT(textOf([&] { Address::parse(text); }), Catch::Contains("not the address"));
  }
}

TEST_CASE("workers of one host use shared memory, others TCP") {
  Pair<NativeShm> pair;
  CHECK(pair.a->describe() == "native(shm,tcp)");
  CHECK_THAT(pair.connect(pair.witness())->describe(), Catch::Contains("unix"));
  pair.accepted(0);
  auto address = Address::parse(pair.address);
  address.host = "another-boot.1";
  auto remote = pair.a->connect(address.text(), "bob", pair.witness());
  CHECK_THAT(remote->describe(), Catch::Contains("tcp 127.0.0.1:"));
  pair.send(*remote, headOnly("hello"));
  CHECK(pair.accepted(1).witness->takeFrame().head == "hello");
}

TEST_CASE("a worker with shared memory and one without use the socket") {
  struct Mixed {
    bool shared_memory = false;
    std::unique_ptr<Transport> make(Limits limits) {
      return makeNative({.shared_memory = std::exchange(shared_memory, true)}, limits);
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
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the processor time of this while is measured
  CHECK(cpuSeconds() - before < 0.05);
}

TEST_CASE("child: a native peer that waits to be killed", "[.child]") {
  auto transport = makeNative({}, {});
  auto connection = transport->connect(ChildProcess::argument(), "parent", std::make_shared<QuietHandler>());
  connection->send(headOnly("I live"), [](Status) {});
  for (;;) pause();
}

TEMPLATE_TEST_CASE(
    "the end of a native peer that is killed is noticed", "", NativeTcp, NativeUnix, NativeShm, NativeRings) {
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
    std::atomic<bool> closed{false};
    void onFrame(Frame&& frame) override {
      connection->send(std::move(frame), [](const Status&) {});
    }
    void onClosed(const Error&) override {
      closed = true;
      closed.notify_one();
    }
  };
  auto echo = std::make_shared<Echo>();
  echo->connection = transport->connect(ChildProcess::argument(), "parent", echo);
  echo->connection->send(headOnly("I live"), [](Status) {});
  echo->closed.wait(false);
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

// ---- threads that poll ----

namespace {
thread_local bool polls = false;
}

TEMPLATE_TEST_CASE("threads that poll deliver frames, in order, and lose none", "", NativeTcp, NativeUnix, NativeShm) {
  constexpr int kFrames = 20'000, kBurst = 50;
  Pair<TestType> pair;
  auto connection = pair.connect(pair.witness());
  auto& witness = *pair.accepted().witness;
  std::atomic<int> received{0}, by_pollers{0}, out_of_order{0};
  witness.hook = [&](const Frame& frame) {
    out_of_order += frame.head != std::to_string(received);
    by_pollers += polls;
    ++received;
    received.notify_all();
  };
  std::atomic<bool> stopped{false};
  std::vector<std::jthread> pollers;
  for (int i = 0; i < 2; ++i) {
    pollers.emplace_back([&] {
      polls = true;
      // As a caller does: polls for a while, then sleeps until a frame has come.
      for (int seen = received; !stopped; seen = received) {
        pair.b->poll([&] { return received != seen; });
        received.wait(seen);
      }
    });
  }
  int sent = 0;
  const auto send = [&] { pair.send(*connection, headOnly(std::to_string(sent++))); };
  while (sent < kFrames) {
    send();
    // From time to time all of them sleep.
    if (sent % kBurst == 1) std::this_thread::sleep_for(std::chrono::microseconds(sent % 300));
  }
  // While the machine has more runnable threads than cores, no thread polls.
  CHECK(eventually([&] {
    send();
    return by_pollers > 0;
  }));
  stopped = true;
  send();
  CHECK(witness.awaitFrames(sent));
  pollers.clear();
  CHECK(out_of_order == 0);
}

TEST_CASE("a thread that polls leaves the loop lock to the loop thread even if messages keep coming") {
  Pair<NativeShm> pair;
  auto connection = pair.connect(pair.witness());
  const auto accepted = pair.accepted();
  std::atomic<bool> stopped{false};
  std::atomic<int> queued{0};
  std::jthread flood([&] {
    while (!stopped) {
      if (queued > 64) continue;
      ++queued;
      connection->send(headOnly("more"), [&](const Status&) { --queued; });
    }
  });
  REQUIRE(accepted.witness->awaitFrames(1));
  std::jthread poller([&] {
    while (!stopped) pair.b->poll([] { return false; });  // returns, or the test hangs
  });
  // Only the loop thread can accept connections.
  for (size_t i = 1; i <= 20; ++i) {
    pair.connect(pair.witness());
    pair.accepted(i);
  }
  stopped = true;
  flood.join();
  while (queued > 0) std::this_thread::yield();
}

TEST_CASE("a transport can be closed while threads poll, and polling a closed one returns") {
  Pair<NativeShm> pair;
  auto connection = pair.connect(pair.witness());
  pair.send(*connection, headOnly("hello"));
  REQUIRE(pair.accepted().witness->awaitFrames(1));
  std::atomic<bool> stopped{false};
  std::jthread poller([&] {
    while (!stopped) pair.b->poll([&] { return stopped.load(); });
  });
  pair.b->close();
  pair.b->poll([] { return false; });
  stopped = true;
}

// ---- threads that park ----

namespace {

/// A thread that waits for frames as callers do: polls, then parks.
class WaitingThread {
 public:
  WaitingThread(Transport& transport, std::atomic<int>& received, bool preemptible)
      : thread_([this, &transport, &received, preemptible] {
          current = this;
          for (int seen = received; !stopped_; seen = received) {
            const auto done = [&] { return received != seen || stopped_; };
            transport.poll(done);
            while (!done()) {
              transport.park(done, futex_waiter_, kNever, preemptible);
              if (!done()) ++early_returns;
              std::this_thread::sleep_for(std::chrono::microseconds(20));  // another thread may lead meanwhile
            }
          }
        }) {}
  ~WaitingThread() {
    stopped_ = true;
    futex_waiter_.notify();
  }
  void notify() { futex_waiter_.notify(); }

  /// The one that runs on the calling thread.
  static thread_local WaitingThread* current;
  std::atomic<int> delivered{0};      ///< frames that it has received itself
  std::atomic<int> early_returns{0};  ///< it was not the leader, or was replaced

 private:
  std::atomic<bool> stopped_{false};
  FutexWaiter futex_waiter_;
  std::jthread thread_;
};

thread_local WaitingThread* WaitingThread::current = nullptr;

/// Frames to a transport with threads that wait for them, one after another.
struct FramesToWaitingThreads {
  FramesToWaitingThreads() {
    witness.hook = [this](const Frame&) {
      if (WaitingThread::current) ++WaitingThread::current->delivered;
      ++received;
      for (auto& thread : threads) thread.notify();
    };
    send();
  }
  ~FramesToWaitingThreads() { threads.clear(); }

  WaitingThread& addThread(bool preemptible = false) { return threads.emplace_back(*pair.b, received, preemptible); }
  void send() {
    pair.send(*connection, headOnly("frame"));
    REQUIRE(witness.awaitFrames(++sent));
  }
  /// Whether that thread receives one of some frames, each of which is sent when all threads are parked.
  bool isDeliveredBy(WaitingThread& thread) {
    const int before = thread.delivered;
    return eventually([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // a guess: all threads are parked by then
      send();
      return thread.delivered > before;
    });
  }

  Pair<NativeShm> pair;
  std::shared_ptr<Connection> connection = pair.connect(pair.witness());
  Witness& witness = *pair.accepted().witness;
  std::atomic<int> received{0};
  int sent = 0;
  std::list<WaitingThread> threads;
};

}  // namespace

TEST_CASE("threads that park miss no frame") {
  NEEDS_FUTEX_WAITER;
  constexpr int kFrames = 10'000;
  FramesToWaitingThreads frames;
  frames.addThread(/*preemptible=*/true);
  frames.addThread();
  frames.addThread();
  // One at a time: no later frame wakes a thread that has missed one.
  while (frames.sent < kFrames) {
    frames.send();
    // Another moment for each frame.
    if (frames.sent % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(frames.sent % 400));
  }
}

TEST_CASE("no frame is missed when leaders leave, or are replaced, while other threads poll") {
  NEEDS_FUTEX_WAITER;
  constexpr int kRounds = 10'000;
  FramesToWaitingThreads frames;
  std::barrier round(4);
  std::atomic<bool> stopped{false};
  // All threads meet at the begin of each round, and leave before its end, so that none of them finds a frame that
  // another has missed.
  const auto everyRound = [&](unsigned seed, auto visit) {
    return std::jthread([&, visit, random = std::minstd_rand(seed)]() mutable {
      while (round.arrive_and_wait(), !stopped) {
        const auto begin = deadlineAfter(std::chrono::microseconds(random() % 100));
        while (std::chrono::steady_clock::now() < begin) std::this_thread::yield();
        visit(begin + std::chrono::microseconds(random() % 100));
        round.arrive_and_wait();
      }
    });
  };
  const auto isPast = [](TimePoint time) { return [time] { return std::chrono::steady_clock::now() >= time; }; };
  const auto idle = everyRound(1, [&](TimePoint deadline) {
    FutexWaiter waiter;
    frames.pair.b->park(isPast(deadline), waiter, deadline, /*preemptible=*/true);
  });
  // In every other round it stays until the frame has come: then no other thread finds a frame that it has missed.
  std::atomic<int> rounds{0};
  FutexWaiter caller_waiter;
  const auto caller = everyRound(2, [&](TimePoint deadline) {
    const bool stays = rounds % 2 == 0;
    const auto received = [&] { return frames.received > rounds + 1; };  // one came before the first round
    const auto done = stays ? std::function<bool()>(received) : isPast(deadline);
    frames.pair.b->park(done, caller_waiter, stays ? kNever : deadline, /*preemptible=*/false);
  });
  const auto poller = everyRound(3, [&](TimePoint deadline) { frames.pair.b->poll(isPast(deadline)); });
  std::minstd_rand random(4);
  const auto limit = deadlineAfter(std::chrono::seconds(10));  // a sanitizer's rounds take long
  for (int i = 0; i < kRounds && std::chrono::steady_clock::now() < limit; ++i) {
    round.arrive_and_wait();
    const auto then = deadlineAfter(std::chrono::microseconds(random() % 200));
    while (std::chrono::steady_clock::now() < then) std::this_thread::yield();
    frames.send();
    caller_waiter.notify();
    round.arrive_and_wait();
    ++rounds;
  }
  stopped = true;
  round.arrive_and_wait();
}

TEST_CASE("the leader receives the frames, and a preemptible leader is replaced") {
  NEEDS_FUTEX_WAITER;
  FramesToWaitingThreads frames;
  auto& idle = frames.addThread(/*preemptible=*/true);
  CHECK(frames.isDeliveredBy(idle));
  const int before = idle.early_returns;
  auto& caller = frames.addThread();
  CHECK(frames.isDeliveredBy(caller));
  CHECK(eventually([&] { return idle.early_returns > before; }));
}

TEST_CASE("a transport can be closed while a thread is parked") {
  NEEDS_FUTEX_WAITER;
  Pair<NativeShm> pair;
  auto connection = pair.connect(pair.witness());
  pair.send(*connection, headOnly("hello"));
  auto& witness = *pair.accepted().witness;
  REQUIRE(witness.awaitFrames(1));
  FutexWaiter waiter;
  std::atomic<bool> closed{false};
  std::jthread parked([&] {
    // It returns early if the loop thread has the loop lock.
    while (!closed) pair.b->park([&] { return closed.load(); }, waiter, kNever, /*preemptible=*/false);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // a guess: it is parked by then
  pair.b->close();
  CHECK(witness.awaitClosed().code() == ErrorCode::kShutdown);
  closed = true;
  waiter.notify();
  parked.join();
  pair.b->park([] { return false; }, waiter, kNever, /*preemptible=*/false);
}

// ---- the choice of the transport ----

TEST_CASE("the transport is native by default") {
  ::unsetenv("TORCHRPC_TRANSPORT");
  CHECK_THAT(torchrpc::makeTransport({.host = "127.0.0.1"})->describe(), Catch::StartsWith("native("));
  CHECK_THAT(torchrpc::makeTransport({.kind = "auto", .host = "127.0.0.1"})->describe(), Catch::StartsWith("native("));
  CHECK_THAT(
      torchrpc::makeTransport({.transports = {{"native"}}, .host = "127.0.0.1"})->describe(),
      Catch::StartsWith("native("));
}

TEST_CASE("an unknown transport is refused with a list of those that exist") {
  CHECK_THAT(
      textOf([] { torchrpc::makeTransport({.kind = "pigeon"}); }),
      Catch::Contains("pigeon") && Catch::Contains("native") && Catch::Contains("tensorpipe"));
  ::setenv("TORCHRPC_TRANSPORT", "pigeon", 1);
  CHECK_THAT(textOf([] { torchrpc::makeTransport({}); }), Catch::Contains("TORCHRPC_TRANSPORT"));
  ::unsetenv("TORCHRPC_TRANSPORT");
}

TEST_CASE("TCP can be chosen within a host, too") {
  CHECK(torchrpc::makeTransport({.kind = "tcp", .host = "127.0.0.1"})->describe() == "native(tcp)");
}

TEST_CASE("the spin budget must be a number") {
  for (const char* text : {"-1", "1ms", "x"}) {
    ::setenv("TORCHRPC_SPIN_US", text, 1);
    CHECK_THAT(textOf([] { torchrpc::makeTransport({.host = "127.0.0.1"}); }), Catch::Contains("TORCHRPC_SPIN_US"));
  }
  ::setenv("TORCHRPC_SPIN_US", "0", 1);
  CHECK_NOTHROW(torchrpc::makeTransport({.host = "127.0.0.1"}));
  ::unsetenv("TORCHRPC_SPIN_US");
}

TEST_CASE("the error for a worker with another transport names the remedy") {
  auto native = makeNative({}, {});
  CHECK_THAT(
      textOf([&] { native->connect("tensorpipe:uv://10.0.0.1:1#uv:*", "bob", std::make_shared<QuietHandler>()); }),
      Catch::Contains("tensorpipe") && Catch::Contains("TORCHRPC_TRANSPORT"));
}

#ifndef TORCHRPC_WITHOUT_TENSORPIPE
TEST_CASE("TensorPipe is used if an option or the environment asks for it") {
  CHECK(torchrpc::makeTransport({.kind = "tensorpipe", .host = "127.0.0.1"})->describe().starts_with("tensorpipe("));
  CHECK(torchrpc::makeTransport({.kind = "tensorpipe", .transports = {{"uv"}}, .host = "127.0.0.1"})
            ->describe()
            .starts_with("tensorpipe(uv"));
  CHECK(torchrpc::makeTransport({.transports = {{"uv"}}, .host = "127.0.0.1"})->describe() == "native(tcp)");
  ::setenv("TORCHRPC_TRANSPORT", "tensorpipe", 1);
  CHECK(torchrpc::makeTransport({.host = "127.0.0.1"})->describe().starts_with("tensorpipe("));
  // Options take precedence over the environment.
  CHECK(torchrpc::makeTransport({.kind = "native", .host = "127.0.0.1"})->describe().starts_with("native("));
  ::unsetenv("TORCHRPC_TRANSPORT");
}
#else
TEST_CASE("the error of a build without TensorPipe that is asked for it names the remedy") {
  CHECK_THAT(textOf([] { makeTransport({.kind = "tensorpipe"}); }), Catch::Contains("built without TensorPipe"));
}
#endif
