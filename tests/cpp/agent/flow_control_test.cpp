// Note [Flow control]: calls that are held back or deferred, and that this blocks nobody for ever.

#include "peers/flow_control.h"

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include <latch>
#include <thread>

#include "agent/loopback_group.h"
#include "testing/manual_timer.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

constexpr size_t kMiB = 1 << 20;

at::Tensor bytes(size_t count) { return at::zeros({static_cast<int64_t>(count)}, at::kByte); }

Message call(std::string payload, size_t tensor_bytes = 0) {
  auto out = message(kCall, std::move(payload));
  if (tensor_bytes > 0) out.tensors = {bytes(tensor_bytes)};
  return out;
}

Message result(size_t tensor_bytes) { return {.kind = Kind::kReply, .tensors = {bytes(tensor_bytes)}}; }

int64_t metric(Agent& agent, const std::string& name) { return std::stoll(agent.metrics().at("agent." + name)); }

/// Fails the test if `condition` does not become true.
void awaitThat(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline)
      throw std::runtime_error("the expected state was not reached in time");
    std::this_thread::yield();
  }
}

/// While `stalled`, the replies that an agent sends stay in its transport, until the clock moves by an hour.
struct StalledReplies {
  const std::shared_ptr<ManualTimer> timer = std::make_shared<ManualTimer>();
  std::atomic<bool> stalled{true};
  std::string only_to{};  ///< the peer, of connections that the agent has opened; empty: all

  FaultPolicy policy() {
    return [this](const FrameInfo& frame, const std::string& peer) -> Fault {
      const bool stalls = stalled && frame.kind == Kind::kReply && (only_to.empty() || peer == only_to);
      return {.delay = stalls ? Duration(1h) : Duration::zero()};
    };
  }
  void release() {
    stalled = false;
    timer->advance(1h);
  }
};

/// The payloads of the calls that have started, in order.
struct StartedLog {
  Mutex mutex;
  std::vector<std::string> payloads TORCHRPC_GUARDED_BY(mutex);

  void add(const Request& request) {
    MutexLock lock(mutex);
    payloads.push_back(request.message.payload);
  }
  std::vector<std::string> all() {
    MutexLock lock(mutex);
    return payloads;
  }
  int64_t size() { return static_cast<int64_t>(all().size()); }
};

std::vector<std::string> numbers(int count) {
  std::vector<std::string> out;
  for (int i = 0; i < count; ++i) out.push_back(std::to_string(i));
  return out;
}

RequestWindow::Call windowCall(CallId id, size_t bytes) {
  return {id, bytes, {}, [](const Status&) {}};
}

}  // namespace

// ---- replies ----

TEST_CASE("while too many bytes of replies wait to be sent, calls of that peer do not start") {
  constexpr int kCalls = 40;
  StalledReplies replies;
  StartedLog started;
  LoopbackGroup group({.timer = replies.timer, .faults = replies.policy(), .threads = 1, .max_queued_bytes = 4 * kMiB});
  group[1].on(kCall, Messenger::Where::kPool, [&](const Request& request, const Responder& responder) {
    started.add(request);
    responder.reply(result(kMiB));
  });
  group.start();
  std::vector<Pending> pending(kCalls);
  for (int i = 0; i < kCalls; ++i) group[0].request(1, call(std::to_string(i)), kNoLimit, pending[i].handler());
  awaitThat([&] { return started.size() + metric(group[1], "num_deferred_calls") == kCalls; });
  // Replies of 1 MiB and a few bytes: the fourth exceeds the limit.
  CHECK(started.size() == 4);
  CHECK(metric(group[1], "queued_reply_bytes") > 4 * static_cast<int64_t>(kMiB));
  CHECK_FALSE(pending[0].done());

  replies.release();
  for (auto& each : pending) CHECK(each.get().ok());
  CHECK(started.all() == numbers(kCalls));
  awaitThat([&] { return metric(group[1], "queued_reply_bytes") == 0; });
  CHECK(metric(group[1], "num_deferred_calls") == 0);
}

TEST_CASE("while replies to one peer wait, the calls of another one, replies and control messages go on") {
  StalledReplies replies;
  replies.only_to = "worker0";
  std::atomic<bool> deleted{false};
  LoopbackGroup group(
      {.size = 3, .timer = replies.timer, .faults = replies.policy(), .threads = 1, .max_queued_bytes = kMiB});
  const auto reply = [](const Request&, const Responder& responder) { responder.reply(result(kMiB)); };
  for (int id = 0; id < 3; ++id) group[id].on(kCall, Messenger::Where::kPool, reply);
  group[1].on(Kind::kRRefUserDelete, Messenger::Where::kLoop, [&](const Request&, const Responder& responder) {
    deleted = true;
    responder.reply({.kind = Kind::kReply});
  });
  group.start();
  // Worker 1 opens the connection, over which worker 0 calls it.
  Pending first;
  group[1].request(0, call("open"), kNoLimit, first.handler());
  REQUIRE(first.get().ok());
  std::vector<Pending> pending(10);
  for (auto& each : pending) group[0].request(1, call("stalled"), kNoLimit, each.handler());
  awaitThat([&] { return metric(group[1], "num_deferred_calls") == 9; });

  Pending other, own, control;
  group[2].request(1, call("other"), kNoLimit, other.handler());
  CHECK(other.get().ok());
  group[1].request(0, call("own"), kNoLimit, own.handler());
  CHECK(own.get().ok());
  group[0].request(1, message(Kind::kRRefUserDelete), kNoLimit, control.handler());
  awaitThat([&] { return deleted.load(); });
  CHECK(metric(group[1], "num_deferred_calls") == 9);
  replies.release();
  for (auto& each : pending) CHECK(each.get().ok());
}

TEST_CASE("the deferred calls of a peer that is lost are dropped, and their arguments freed") {
  StalledReplies replies;
  StartedLog started;
  LoopbackGroup group({.timer = replies.timer, .faults = replies.policy(), .threads = 1, .max_queued_bytes = kMiB});
  group[1].on(kCall, Messenger::Where::kPool, [&](const Request& request, const Responder& responder) {
    started.add(request);
    responder.reply(result(kMiB));
  });
  group.start();
  std::vector<Pending> pending(10);
  for (auto& each : pending) group[0].request(1, call("x"), kNoLimit, each.handler());
  awaitThat([&] { return metric(group[1], "num_deferred_calls") == 9; });
  group[1].admit({.info = group[0].self(), .incarnation = LoopbackGroup::incarnationOf(0) + 1});
  for (auto& each : pending) CHECK_FALSE(each.get().ok());
  replies.release();
  // Nothing of the calls is left: neither a deferred one nor a Responder.
  CHECK(group[1].waitIdle(20s));
  CHECK(started.size() == 1);
}

TEST_CASE("an agent with deferred calls can close") {
  StalledReplies replies;
  LoopbackGroup group({.timer = replies.timer, .faults = replies.policy(), .threads = 1, .max_queued_bytes = kMiB});
  group[1].on(kCall, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    responder.reply(result(kMiB));
  });
  group.start();
  std::vector<Pending> pending(10);
  for (auto& each : pending) group[0].request(1, call("x"), kNoLimit, each.handler());
  awaitThat([&] { return metric(group[1], "num_deferred_calls") == 9; });
  group[1].close();
  for (auto& each : pending) CHECK_FALSE(each.get().ok());
  CHECK(group[1].waitIdle(20s));
}

TEST_CASE("a reply that exceeds the limit alone is sent") {
  LoopbackGroup group({.max_queued_bytes = 1});
  group[1].on(kCall, Messenger::Where::kPool, [&](const Request&, const Responder& responder) {
    responder.reply(result(kMiB));
  });
  group.start();
  for (int i = 0; i < 10; ++i) {
    Pending pending;
    group[0].request(1, call("x", 2 * kMiB), kNoLimit, pending.handler());
    CHECK(pending.get().ok());
  }
}

// ---- calls ----

namespace {

/// Two workers; the one thread of worker 1 is blocked until release().
struct BlockedCallee {
  std::latch released{1};
  StartedLog started;
  LoopbackGroup group;  // destroyed first: it runs the calls that are left

  explicit BlockedCallee(size_t max_queued_bytes) : group({.threads = 1, .max_queued_bytes = max_queued_bytes}) {
    group[1].on(kCall, Messenger::Where::kPool, [this](const Request& request, const Responder& responder) {
      started.add(request);
      released.wait();
      responder.reply({.kind = Kind::kReply});
    });
    group[1].on(Kind::kCppRemote, Messenger::Where::kLoop, [](const Request&, const Responder& responder) {
      responder.reply({.kind = Kind::kReply});
    });
    group[0].on(kCall, Messenger::Where::kPool, [](const Request&, const Responder& responder) {
      responder.reply({.kind = Kind::kReply});
    });
    group.start();
  }
  /// When it returns, worker 1 has received all that worker 0 has sent, and worker 0 what worker 1 sent before.
  void roundTrip() {
    Pending pending;
    group[0].request(1, message(Kind::kRRefFetch), kNoLimit, pending.handler());
    CHECK_FALSE(pending.get());  // refused on the loop: there is no handler
  }
};

}  // namespace

TEST_CASE("a caller holds calls back while too many bytes of its calls wait on the callee") {
  constexpr int kCalls = 40;
  BlockedCallee callee(8 * kMiB);
  auto& group = callee.group;
  std::vector<Pending> pending(kCalls);
  for (int i = 0; i < kCalls; ++i) group[0].request(1, call(std::to_string(i), kMiB), kNoLimit, pending[i].handler());
  awaitThat([&] { return callee.started.size() == 1; });
  callee.roundTrip();
  // One runs and eight wait: the callee has told its window when the first one started.
  CHECK(metric(group[0], "num_held_calls") == kCalls - 9);
  callee.released.count_down();
  for (auto& each : pending) CHECK(each.get().ok());
  CHECK(callee.started.all() == numbers(kCalls));
  CHECK(metric(group[0], "num_held_calls") == 0);
}

TEST_CASE("small calls do not overtake calls that are held back") {
  BlockedCallee callee(2 * kMiB);
  auto& group = callee.group;
  std::vector<Pending> pending(10);
  for (int i = 0; i < 10; ++i) {
    group[0].request(1, call(std::to_string(i), i % 5 == 4 ? 0 : 2 * kMiB), kNoLimit, pending[i].handler());
  }
  awaitThat([&] { return callee.started.size() == 1; });
  callee.roundTrip();
  CHECK(metric(group[0], "num_held_calls") > 4);
  callee.released.count_down();
  for (auto& each : pending) CHECK(each.get().ok());
  CHECK(callee.started.all() == numbers(10));
}

TEST_CASE("calls that are held back fail when the callee is lost") {
  BlockedCallee callee(2 * kMiB);
  auto& group = callee.group;
  std::vector<Pending> pending(10);
  for (auto& each : pending) group[0].request(1, call("x", kMiB), kNoLimit, each.handler());
  awaitThat([&] { return callee.started.size() == 1; });
  callee.roundTrip();
  REQUIRE(metric(group[0], "num_held_calls") > 0);
  group[0].admit({.info = group[1].self(), .incarnation = LoopbackGroup::incarnationOf(1) + 1});
  for (auto& each : pending) {
    const auto result = each.get();
    REQUIRE_FALSE(result.ok());
    CHECK(result.error().code() == ErrorCode::kWorkerLost);
  }
  CHECK(group[0].waitIdle(20s));
  callee.released.count_down();
}

TEST_CASE("replies arrive at a worker whose threads are all occupied, however many calls wait there") {
  // The functions that occupy the threads wait for something that needs the reply, for example a lock of its caller.
  BlockedCallee callee(kMiB);
  auto& group = callee.group;
  std::vector<Pending> flood(40);
  for (auto& each : flood) group[0].request(1, call("x", kMiB), kNoLimit, each.handler());
  awaitThat([&] { return callee.started.size() == 1; });
  Pending pending;
  group[1].request(0, call("y", 4 * kMiB), kNoLimit, pending.handler());
  CHECK(pending.get().ok());
  callee.released.count_down();
  for (auto& each : flood) CHECK(each.get().ok());
}

TEST_CASE("workers that flood each other with nested calls, all larger than the limit, finish") {
  constexpr int kCalls = 30, kDepth = 3;
  LoopbackGroup group({.threads = 2, .max_queued_bytes = 1000});
  for (int id = 0; id < 2; ++id) {
    group[id].on(kCall, Messenger::Where::kPool, [&, id](const Request& request, const Responder& responder) {
      const int depth = std::stoi(request.message.payload);
      if (depth < kDepth) {
        Pending nested;
        group[id].request(1 - id, call(std::to_string(depth + 1), kMiB), kNoLimit, nested.handler());
        const ThreadPool::BlockingScope scope;
        nested.get().take();
      }
      responder.reply(result(kMiB));
    });
  }
  group.start();
  std::vector<Pending> pending(2 * kCalls);
  for (int i = 0; i < 2 * kCalls; ++i) group[i % 2].request(1 - i % 2, call("0", kMiB), kNoLimit, pending[i].handler());
  for (auto& each : pending) CHECK(each.get().ok());
}

// ---- the parts ----

TEST_CASE("a window counts the calls that wait, and lets one of any size pass") {
  RequestWindow window;
  CHECK_FALSE(window.concerns(kMinCountedBytes - 1));
  CHECK(window.concerns(kMinCountedBytes));
  CHECK(window.admit(windowCall(1, size_t{1} << 40)));
  CHECK_FALSE(window.admit(windowCall(2, kMinCountedBytes)));
  CHECK_FALSE(window.admit(windowCall(3, 1)));
  CHECK(window.concerns(1));
  CHECK(window.heldCount() == 2);
  CHECK_FALSE(window.release(7));
  CHECK_FALSE(window.release({.window = 0, .started = {8, 9}}));
  REQUIRE(window.release(1));
  CHECK_FALSE(window.admit(windowCall(4, 1)));  // another thread is sending those that were held back
  CHECK(window.takeHeld()->id == 2);
  CHECK(window.takeHeld()->id == 3);
  CHECK(window.takeHeld()->id == 4);
  CHECK_FALSE(window.takeHeld());
  CHECK_FALSE(window.concerns(1));
}

TEST_CASE("a closed window returns what it holds, and holds no more") {
  RequestWindow window;
  CHECK(window.admit(windowCall(1, RequestWindow::kInitialBytes)));
  CHECK_FALSE(window.admit(windowCall(2, kMiB)));
  CHECK(window.close().size() == 1);
  CHECK(window.admit(windowCall(3, kMiB)));
  CHECK_FALSE(window.release(1));
}

TEST_CASE("callers share the limit of the callee, and have a window of 1 MiB in any case") {
  const auto senders = std::make_shared<std::atomic<size_t>>(0);
  const auto window = [&](StartedCalls& calls, size_t max_window) {
    calls.onArrived(max_window);
    return calls.onStarted(1, max_window)->window;
  };
  StartedCalls first(64 * kMiB, senders);
  CHECK(window(first, 64 * kMiB) == 64 * kMiB);
  {
    StartedCalls second(64 * kMiB, senders);
    second.onArrived(1);
    CHECK(window(first, 64 * kMiB) == 64 * kMiB);
    CHECK(window(second, 64 * kMiB) == 32 * kMiB);
    CHECK(window(first, 64 * kMiB) == 32 * kMiB);
  }
  CHECK(window(first, 64 * kMiB) == 64 * kMiB);
  StartedCalls small(10, senders);
  CHECK(window(small, 64 * kMiB) == kMiB);
}

TEST_CASE("calls that are answered soon need no report") {
  StartedCalls calls(64 * kMiB, std::make_shared<std::atomic<size_t>>(0));
  for (CallId id = 1; id <= 100; ++id) {
    CHECK_FALSE(calls.onStarted(id, kMiB / 2));
    calls.onAnswered(id);
  }
  CHECK_FALSE(calls.onStarted(101, kMiB / 2));
  CHECK(calls.onStarted(102, kMiB / 2)->started == std::vector<CallId>{101, 102});
}

TEST_CASE("a report can be read from its bytes, and nothing else can") {
  const auto report = StartReport::decode(StartReport{.window = 5, .started = {1, 2}}.encode());
  CHECK(report.window == 5);
  CHECK(report.started == std::vector<CallId>{1, 2});
  CHECK_THROWS_AS(StartReport::decode(""), Error);
  CHECK_THROWS_AS(StartReport::decode(std::string(15, 'x')), Error);
}

TEST_CASE("the variable TORCHRPC_MAX_QUEUED_BYTES is a positive number") {
  const auto with = [](const char* value) {
    ::setenv("TORCHRPC_MAX_QUEUED_BYTES", value, 1);
    const auto unset = std::shared_ptr<void>(nullptr, [](void*) { ::unsetenv("TORCHRPC_MAX_QUEUED_BYTES"); });
    return defaultMaxQueuedBytes();
  };
  CHECK(with("1000") == 1000);
  CHECK(with("") == kDefaultMaxQueuedBytes);
  for (const auto* text : {"0", "-1", "1.5", "1MiB", "99999999999999999999999"}) {
    CAPTURE(text);
    CHECK_THROWS_WITH(with(text), Catch::Contains("TORCHRPC_MAX_QUEUED_BYTES must be a positive number"));
  }
}
