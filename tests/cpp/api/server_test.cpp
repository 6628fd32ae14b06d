// What servers need of the public API: interceptors and metadata, admission, executors of functions, leaving, health,
// metrics.

#include <ATen/ATen.h>

#include <arpa/inet.h>
#include <atomic>
#include <future>
#include <latch>
#include <mutex>
#include <netinet/in.h>
#include <set>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include "api/group.h"
#include "outcomes.h"
#include "torchrpc/function.h"
#include "torchrpc/task.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

std::string tenantOf(const Call& call) {
  const auto& metadata = call.metadata();
  const auto found = metadata.find("tenant");
  return found == metadata.end() ? "nobody" : found->second;
}
TORCHRPC_FUNCTION(tenantOf);

std::string tenantOfNested(const Call& call) { return call.node.call(call.caller, &tenantOf); }
TORCHRPC_FUNCTION(tenantOfNested);

int failAlways() { throw std::runtime_error("it never works"); }
TORCHRPC_FUNCTION(failAlways);

int holdsTensor(const RRef<at::Tensor>& /*tensor*/) { return 1; }
TORCHRPC_FUNCTION(holdsTensor);

/// Writes down what it sees.
class Recorder final : public Interceptor {
 public:
  explicit Recorder(std::string name = "") : name_(std::move(name)) {}

  End onSend(OutgoingCall& call) override {
    return note(
        "send " + call.function + " to " + call.callee.name + (call.is_remote ? " (remote)" : ""), call.function);
  }
  End onServe(const IncomingCall& call) override {
    return note(
        "serve " + call.function + " for " + call.caller.name + (call.is_remote ? " (remote)" : ""), call.function);
  }
  std::vector<std::string> events() const {
    const std::scoped_lock lock(mutex_);
    return events_;
  }
  /// Waits until so many have come.
  std::vector<std::string> events(size_t count) const {
    test::eventually([&] { return events().size() >= count; });
    return events();
  }

 private:
  End note(const std::string& event, const std::string& function) {
    add(event);
    return [this, function](const Error* error) {
      add("end of " + function + (error ? ": " + std::string(torchrpc::name(error->code())) : ""));
    };
  }
  void add(const std::string& event) {
    const std::scoped_lock lock(mutex_);
    events_.push_back(name_ + event);
  }

  const std::string name_;
  mutable std::mutex mutex_;
  std::vector<std::string> events_;
};

/// Lets only calls with the right token pass, and sends it.
class Token final : public Interceptor {
 public:
  explicit Token(std::string sent) : sent_(std::move(sent)) {}
  End onSend(OutgoingCall& call) override {
    if (call.function == "cpp_function(tenantOf)" && sent_ == "forbidden here") {
      throw Error(ErrorCode::kNotAllowed, "this program must not ask");
    }
    if (call.metadata.contains("stay")) throw Error(ErrorCode::kNotAllowed, "this call must not leave");
    call.metadata["token"] = sent_;
    return {};
  }
  End onServe(const IncomingCall& call) override {
    const auto found = call.metadata.find("token");
    if (found == call.metadata.end() || found->second != "open sesame") {
      throw Error(ErrorCode::kNotAllowed, "the token of " + call.caller.name + " is wrong");
    }
    return {};
  }

 private:
  const std::string sent_;
};

using Events = std::vector<std::string>;

/// Whether that worker refuses new calls, because it ends.
bool refusesCalls(const NodeRef& node, int rank) {
  try {
    node.call(rank, &tenantOf);
    return false;
  } catch (const Error& error) {
    return error.code() == ErrorCode::kShutdown;
  }
}

/// Connects a socket to that port of this host; whether somebody listens there.
bool connectTo(int fd, const std::string& address) {
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return ::connect(fd, reinterpret_cast<sockaddr*>(&where), sizeof(where)) == 0;
}

/// The answer to a request over HTTP; empty if there is none.
std::string ask(const std::string& address, const std::string& request) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  std::string answer;
  if (connectTo(fd, address)) {
    static_cast<void>(::send(fd, request.data(), request.size(), MSG_NOSIGNAL));
    char bytes[1024];
    for (ssize_t got = 0; (got = ::recv(fd, bytes, sizeof(bytes), 0)) > 0;) answer.append(bytes, got);
  }
  ::close(fd);
  return answer;
}
std::string probe(const std::string& address) { return ask(address, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"); }

}  // namespace

TEST_CASE("metadata travel with one call, and not with those that the function makes") {
  Group group(2);
  const auto node = group[0].withMetadata({{"tenant", "acme"}});
  CHECK(node.call(1, &tenantOf) == "acme");
  CHECK(node.call(0, &tenantOf) == "acme");  // to this worker itself
  CHECK(node.remote(1, &tenantOf).toHere() == "acme");
  CHECK(node.call(1, &tenantOfNested) == "nobody");
  CHECK(group[0].call(1, &tenantOf) == "nobody");
  CHECK(node.withMetadata({}).call(1, &tenantOf) == "nobody");
  group.shutdown();
}

TEST_CASE("metadata beyond the limits are refused where they are given") {
  Group group(1);
  const auto code = [&](Metadata metadata) {
    return errorOf([&] { static_cast<void>(group[0].withMetadata(std::move(metadata))); }).code();
  };
  CHECK(code({{"", "x"}}) == ErrorCode::kInvalidArgument);
  CHECK(code({{std::string(257, 'n'), "x"}}) == ErrorCode::kInvalidArgument);
  CHECK(code({{"n", std::string(16 << 10, 'x')}}) == ErrorCode::kInvalidArgument);
  CHECK(code({{"traceparent", "00-not-a-trace-01"}}) == ErrorCode::kInvalidArgument);
  Metadata many;
  for (int i = 0; i < 129; ++i) many.emplace(std::to_string(i), "x");
  CHECK(code(many) == ErrorCode::kInvalidArgument);
  group.shutdown();
}

TEST_CASE("interceptors see each call of both sides once, and its end") {
  const auto caller = std::make_shared<Recorder>(), callee = std::make_shared<Recorder>();
  Group group(2, [&](NodeOptions& options) { options.interceptors = {options.rank == 0 ? caller : callee}; });
  group[0].call(1, &tenantOf);
  group[0].call<at::Tensor>(1, op("aten::neg"), at::ones(2));
  CHECK(errorOf([&] { group[0].call(1, &failAlways); }).code() == ErrorCode::kUserException);
  CHECK_THROWS_AS(group[0].remote(1, &failAlways).toHere(), Error);
  CHECK(
      caller->events(8) ==
      Events{
          "send cpp_function(tenantOf) to worker1", "end of cpp_function(tenantOf)", "send aten::neg to worker1",
          "end of aten::neg", "send cpp_function(failAlways) to worker1",
          "end of cpp_function(failAlways): user exception", "send cpp_function(failAlways) to worker1 (remote)",
          // The call has made an RRef; what it refers to is an error.
          "end of cpp_function(failAlways)"});
  CHECK(
      callee->events(8) ==
      Events{
          "serve cpp_function(tenantOf) for worker0", "end of cpp_function(tenantOf)", "serve aten::neg for worker0",
          "end of aten::neg", "serve cpp_function(failAlways) for worker0",
          "end of cpp_function(failAlways): user exception", "serve cpp_function(failAlways) for worker0 (remote)",
          "end of cpp_function(failAlways): user exception"});
  group.shutdown();
  CHECK(caller->events().size() == 8);  // control messages are not shown
}

TEST_CASE("the first interceptor sees the begin of a call first and its end last") {
  struct Named final : Interceptor {
    Named(std::shared_ptr<std::vector<std::string>> events, std::string name)
        : events(std::move(events)), name(std::move(name)) {}
    End onSend(OutgoingCall& call) override {
      events->push_back(name + " begins");
      call.metadata["tenant"] += name;
      return [this](const Error*) { events->push_back(name + " ends"); };
    }
    std::shared_ptr<std::vector<std::string>> events;
    std::string name;
  };
  const auto events = std::make_shared<std::vector<std::string>>();
  Group group(2, [&](NodeOptions& options) {
    if (options.rank != 0) return;
    options.interceptors = {std::make_shared<Named>(events, "a"), std::make_shared<Named>(events, "b")};
  });
  CHECK(group[0].withMetadata({{"tenant", "x"}}).call(1, &tenantOf) == "xab");
  CHECK(*events == Events{"a begins", "b begins", "b ends", "a ends"});
  group.shutdown();
}

TEST_CASE("an exception at the end of a call in an interceptor has no effect, and the others see the end") {
  struct Throwing final : Interceptor {
    End onSend(OutgoingCall&) override { return thrower(); }
    End onServe(const IncomingCall&) override { return thrower(); }
    static End thrower() {
      return [](const Error*) { throw std::runtime_error("at the end"); };
    }
  };
  const auto caller = std::make_shared<Recorder>(), callee = std::make_shared<Recorder>();
  const auto throwing = std::make_shared<Throwing>();
  Group group(2, [&](NodeOptions& options) {
    options.interceptors = {throwing, options.rank == 0 ? caller : callee, throwing};
  });
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(group[0].call(rank, &tenantOf) == "nobody");
    CHECK(errorOf([&] { group[0].call(rank, &failAlways); }).code() == ErrorCode::kUserException);
    CHECK(group[0].remote<std::string>(rank, "tenantOf").toHere() == "nobody");
  }
  CHECK(caller->events(18).size() == 18);  // both sides of three calls to itself, and one side of three to the other
  CHECK(callee->events(6).size() == 6);
  group.shutdown();
}

TEST_CASE("an interceptor refuses calls, which do not run, and their RRefs are released") {
  const auto sent = std::make_shared<std::string>("open sesame");
  struct Sender final : Interceptor {
    explicit Sender(std::shared_ptr<std::string> token) : token(std::move(token)) {}
    End onSend(OutgoingCall& call) override {
      call.metadata["token"] = *token;
      return {};
    }
    std::shared_ptr<std::string> token;
  };
  const auto seen = std::make_shared<Recorder>();
  Group group(2, [&](NodeOptions& options) {
    if (options.rank == 0) {
      options.interceptors = {std::make_shared<Sender>(sent)};
    } else {
      options.interceptors = {seen, std::make_shared<Token>(""), std::make_shared<Recorder>()};
    }
  });
  CHECK(group[0].call(1, &tenantOf) == "nobody");
  *sent = "let me in";
  const auto refused = errorOf([&] { group[0].call(1, &tenantOf); });
  CHECK(refused.code() == ErrorCode::kNotAllowed);
  CHECK(refused.origin() == ErrorOrigin::kRequest);
  CHECK(refused.text().find("the token of worker0 is wrong") != std::string::npos);
  CHECK(seen->events(4).back() == "end of cpp_function(tenantOf): not allowed");  // the outer one learns of it
  CHECK(errorOf([&] { group[0].remote(1, &tenantOf).toHere(); }).text().find("the token") != std::string::npos);
  {
    const auto value = group[0].makeRRef(at::ones(3));
    CHECK(errorOf([&] { group[0].call(1, &holdsTensor, value); }).code() == ErrorCode::kNotAllowed);
  }
  CHECK(test::eventually([&] { return group[0].nodeMetrics().rrefs_owned == 0; }));
  *sent = "open sesame";
  group.shutdown();
}

TEST_CASE("an interceptor of the caller ends a call before it is sent") {
  const auto callee = std::make_shared<Recorder>();
  Group group(2, [&](NodeOptions& options) {
    if (options.rank == 0) options.interceptors = {std::make_shared<Token>("forbidden here")};
    if (options.rank == 1) options.interceptors = {callee};
  });
  const auto refused = errorOf([&] { group[0].call(1, &tenantOf); });
  CHECK(refused.code() == ErrorCode::kNotAllowed);
  CHECK(refused.origin() == ErrorOrigin::kHere);
  CHECK(callee->events().empty());
  {
    const auto value = group[0].makeRRef(at::ones(3));
    CHECK(group[0].call(1, &holdsTensor, value) == 1);
    const auto node = group[0].withMetadata({{"stay", ""}});
    CHECK(errorOf([&] { node.call(1, &holdsTensor, value); }).code() == ErrorCode::kNotAllowed);
  }
  CHECK(test::eventually([&] { return group[0].nodeMetrics().rrefs_owned == 0; }));
  group.shutdown();
}

TEST_CASE("a node serves no more calls at a time than max_calls") {
  std::latch arrived{2}, released{1};
  registerFunction("holdPlace", [&] {
    arrived.count_down();
    released.wait();
    return 1;
  });
  Group group(2, [](NodeOptions& options) {
    options.threads = 4;
    if (options.rank == 1) options.max_calls = 2;
  });
  auto first = group[0].callAsync<int>(1, "holdPlace"), second = group[0].callAsync<int>(1, "holdPlace");
  arrived.wait();
  const auto refused = errorOf([&] { group[0].call(1, &tenantOf); });
  CHECK(refused.code() == ErrorCode::kQuotaExceeded);
  CHECK(refused.worker() == "worker1");
  CHECK(refused.text().find("max_calls") != std::string::npos);
  CHECK(group[1].nodeMetrics().refused_by_quota == 1);
  released.count_down();
  CHECK(first.wait() + second.wait() == 2);
  CHECK(group[0].call(1, &tenantOf) == "nobody");
  group.shutdown();
}

TEST_CASE("a worker that stays silent for liveness_timeout is lost, and its calls fail") {
  CHECK(errorOf([] {
          Node({.name = "w", .rank = 0, .world_size = 1, .liveness_timeout = -1s});
        }).code() == ErrorCode::kInvalidArgument);
  std::latch is_attached{1}, is_silent{1};
  registerFunction(
      "afterAttaching", [&] { is_attached.wait(); });  // so the continuation runs on the loop of its caller
  Group group(2, [](NodeOptions& options) {
    if (options.rank == 0) options.liveness_timeout = 300ms;
  });
  const auto silence =
      group[1].callAsync<void>(0, "afterAttaching").then(Executor::inlined(), [&](const Future<void>&) {
        is_silent.count_down();
        std::this_thread::sleep_for(2s);  // longer than liveness_timeout, and shorter than the time-out of the call
      });
  is_attached.count_down();
  is_silent.wait();
  const auto begun = std::chrono::steady_clock::now();
  const auto lost = errorOf([&] { group[0].call<void>(1, "afterAttaching"); });
  CHECK(lost.code() == ErrorCode::kWorkerLost);
  CHECK_THAT(lost.text(), Catch::Contains("worker1 has been silent for"));
  CHECK(std::chrono::steady_clock::now() - begun < 1900ms);
  silence.wait();
}

TEST_CASE("a function with threads of its own leaves those of the pool to others") {
  std::latch released{1};
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::atomic<int> running{0}, most{0};
  const auto slow = [&] {
    {
      const std::scoped_lock lock(mutex);
      threads.insert(std::this_thread::get_id());
    }
    const int now = ++running;
    for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
    }
    released.wait();
    --running;
    return 1;
  };
  registerFunction("slowOnOwnThreads", slow, {.executor = Executor::threads(2)});
  Group group(2);
  std::vector<Future<int>> calls;
  for (int i = 0; i < 20; ++i) calls.push_back(group[0].callAsync<int>(1, "slowOnOwnThreads"));
  for (int i = 0; i < 100; ++i) CHECK(group[0].call(1, &tenantOf) == "nobody");  // not held up
  released.count_down();
  for (auto& call : calls) CHECK(call.wait() == 1);
  CHECK(most <= 2);
  CHECK(threads.size() <= 2);
  CHECK_THROWS_AS(Executor::threads(0), Error);
  group.shutdown();
}

TEST_CASE("a function runs with its call's context on its executor; its errors and a dropped task reach the caller") {
  std::vector<std::function<void()>> queue;
  std::mutex mutex;
  const Executor mine([&](std::function<void()> task) {
    const std::scoped_lock lock(mutex);
    queue.push_back(std::move(task));
  });
  registerFunction("throwsOnExecutor", []() -> int { throw std::runtime_error("out of luck"); }, {.executor = mine});
  registerFunction(
      "leftOnExecutor", [](const Call& call) { return std::chrono::duration<double>(call.timeLeft()).count(); },
      {.executor = Executor::threads(1)});
  registerFunction(
      "nestedOnExecutor",
      [](const Call& call, const std::string& name) -> Task<std::string> {
        co_return name + co_await call.node.callAsync<std::string>(call.caller, "tenantOf");
      },
      {.executor = Executor::threads(1)});
  Group group(2, [](NodeOptions& options) { options.propagate_deadlines = true; });
  const auto left = group[0].withTimeout(10s).call<double>(1, "leftOnExecutor");
  CHECK(left > 0);
  CHECK(left <= 10);
  CHECK(group[0].call<std::string>(1, "nestedOnExecutor", std::string("is ")) == "is nobody");
  const auto queued = [&] {
    const std::scoped_lock lock(mutex);
    return queue.size();
  };
  auto failing = group[0].callAsync<int>(1, "throwsOnExecutor");
  REQUIRE(test::eventually([&] { return queued() == 1; }));  // two calls can be queued in either order
  auto dropped = group[0].callAsync<int>(1, "throwsOnExecutor");
  REQUIRE(test::eventually([&] { return queued() >= 2; }));
  REQUIRE(queued() == 2);
  queue[0]();
  queue.clear();
  const auto error = errorOf([&] { failing.wait(); });
  CHECK(error.code() == ErrorCode::kUserException);
  CHECK(error.text().find("out of luck") != std::string::npos);
  const auto unrun = errorOf([&] { dropped.wait(); });
  CHECK(unrun.code() == ErrorCode::kShutdown);
  CHECK(unrun.text().find("throwsOnExecutor") != std::string::npos);
  group.shutdown();
}

TEST_CASE("the error of a call that an executor did not take says what the executor threw") {
  const Executor full([](const std::function<void()>&) { throw std::runtime_error("the queue is full"); });
  std::promise<std::function<void()>> kept;
  const Executor late([&](std::function<void()> task) {
    kept.set_value(std::move(task));
    throw std::runtime_error("taken all the same");
  });
  registerFunction("onFullExecutor", [] { return 1; }, {.executor = full});
  registerFunction("onLateExecutor", [] { return 2; }, {.executor = late});
  Group group(2);
  const auto refused = errorOf([&] { group[0].call<int>(1, "onFullExecutor"); });
  CHECK(refused.code() == ErrorCode::kShutdown);
  CHECK_THAT(refused.text(), Catch::EndsWith("has dropped the call: the queue is full"));
  const auto taken = group[0].callAsync<int>(1, "onLateExecutor");
  kept.get_future().get()();
  CHECK(taken.wait(20s) == 2);
  group.shutdown();
}

TEST_CASE("a worker that leaves answers what it has begun, and the others end without it") {
  std::latch arrived{1};
  std::atomic<bool> released{false};
  registerFunction("lastWork", [&] {
    arrived.count_down();
    test::eventually([&] { return released.load(); });
    return 7;
  });
  std::mutex mutex;
  std::vector<std::string> changes;
  Group group(3, [&](NodeOptions& options) {
    if (options.rank != 0) return;
    options.on_member_change = [&](const WorkerInfo& worker, MemberChange change) {
      const std::scoped_lock lock(mutex);
      changes.push_back(worker.name + " " + std::string(name(change)));
    };
  });
  std::atomic<int> lost{0};
  group[0].onWorkerLost([&](const WorkerInfo&) { ++lost; });
  group[1].call(2, &tenantOf);
  auto last = group[0].callAsync<int>(2, "lastWork");
  arrived.wait();
  std::atomic<bool> has_ended{false};
  std::thread leaving([&] { has_ended = group[2].leave(20s); });
  // New calls are refused while the old one goes on.
  CHECK(test::eventually([&] { return refusesCalls(group[0], 2); }));
  released = true;
  CHECK(last.wait() == 7);
  leaving.join();
  CHECK(has_ended);
  CHECK(group[0].call(1, &tenantOf) == "nobody");
  std::thread other([&] { group[1].shutdown(20s); });
  CHECK_NOTHROW(group[0].shutdown(20s));
  other.join();
  CHECK(lost == 0);
  const std::scoped_lock lock(mutex);
  CHECK(changes == Events{"worker2 left"});
}

TEST_CASE("while a worker leaves, functions on executors still make the calls that they need") {
  std::latch arrived{1};
  std::atomic<bool> released{false};
  registerFunction(
      "askBeforeTheEnd",
      [&](const Call& call) {
        arrived.count_down();
        test::eventually([&] { return released.load(); });
        return call.node.call(call.caller, &tenantOf);
      },
      {.executor = Executor::threads(1)});
  Group group(2);
  auto last = group[0].callAsync<std::string>(1, "askBeforeTheEnd");
  arrived.wait();
  std::atomic<bool> has_ended{false};
  std::thread leaving([&] { has_ended = group[1].leave(20s); });
  CHECK(test::eventually([&] { return refusesCalls(group[0], 1); }));
  released = true;
  CHECK(last.wait() == "nobody");
  leaving.join();
  CHECK(has_ended);
  group[0].shutdown(20s);
}

TEST_CASE("leave() waits no longer than its time-out") {
  std::latch arrived{1}, released{1};
  registerFunction("neverEnds", [&] {
    arrived.count_down();
    released.wait();
    return 1;
  });
  Group group(2);
  auto call = group[0].callAsync<int>(1, "neverEnds");
  arrived.wait();
  const auto begun = std::chrono::steady_clock::now();
  std::atomic<bool> has_left{false};
  std::thread release([&] {
    test::eventually([&] { return has_left.load(); });
    released.count_down();  // stop() waits for the functions themselves
  });
  CHECK_FALSE(group[1].leave(100ms));
  CHECK(std::chrono::steady_clock::now() - begun < 4s);
  has_left = true;
  release.join();
  CHECK_THROWS_AS(call.wait(), Error);
  CHECK(errorOf([&] { group[0].leave(-1s); }).code() == ErrorCode::kInvalidArgument);
  CHECK_NOTHROW(group[0].shutdown(20s));
}

TEST_CASE("probes learn over HTTP whether a worker serves calls") {
  std::atomic<bool> is_well{true};
  Group group(1, [&](NodeOptions& options) {
    options.health = {.address = "127.0.0.1:0", .check = [&]() -> std::string {
                        if (!is_well) throw std::runtime_error("the disk is full");
                        return "";
                      }};
  });
  const auto address = group[0].healthAddress();
  CHECK(probe(address).starts_with("HTTP/1.1 200 OK\r\n"));
  CHECK(ask(address, "GET / HTTP/1.0\r\n\r\n").ends_with("\r\n\r\nserving\n"));
  CHECK(ask(address, "GET /healthz?verbose HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 200"));
  is_well = false;
  CHECK(probe(address).starts_with("HTTP/1.1 503 "));
  CHECK(probe(address).ends_with("not serving: the disk is full\n"));
  is_well = true;
  CHECK(ask(address, "GET /secrets HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 404 "));
  CHECK(ask(address, "POST /healthz HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 405 "));
  CHECK(ask(address, std::string(9000, 'x')).starts_with("HTTP/1.1 405 "));
  group.shutdown();
  CHECK(probe(address).empty());
}

TEST_CASE("the program's own health check gets an error when it ends the node") {
  std::unique_ptr<Node> node;
  std::atomic<bool> may_end{false};
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto check = [&]() -> std::string {
    if (may_end) node->stop();
    return "";
  };
  node = std::make_unique<Node>(
      NodeOptions{.name = "alone", .rank = 0, .world_size = 1, .health = {.address = "127.0.0.1:0", .check = check}},
      store);
  may_end = true;
  CHECK_THAT(probe(node->healthAddress()), Catch::Contains("requestStop()"));
  node.reset();
}

TEST_CASE("clients that say nothing hold up no probe for long") {
  Group group(1, [&](NodeOptions& options) { options.health.address = "127.0.0.1:0"; });
  const auto address = group[0].healthAddress();
  std::vector<int> silent;
  for (int i = 0; i < 600; ++i) {
    silent.push_back(::socket(AF_INET, SOCK_STREAM, 0));
    REQUIRE(connectTo(silent.back(), address));
  }
  const auto begun = std::chrono::steady_clock::now();
  CHECK(probe(address).starts_with("HTTP/1.1 200 "));
  CHECK(std::chrono::steady_clock::now() - begun < 4s);  // to wait for the end of each would take 9 s
  for (const int fd : silent) ::close(fd);
  group.shutdown();
}

TEST_CASE("an address for probes that cannot be used is refused") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto code = [&](const std::string& address) {
    return errorOf([&] { Node node({.name = "w", .rank = 0, .world_size = 1, .health = {.address = address}}, store); })
        .code();
  };
  CHECK(code("localhost:http") == ErrorCode::kInvalidArgument);
  CHECK(code("70000") == ErrorCode::kInvalidArgument);
}

TEST_CASE("a node counts its calls by function and peer, as values with types") {
  Group group(2, [](NodeOptions& options) { options.metrics = true; });
  for (int i = 0; i < 5; ++i) group[0].call(1, &tenantOf);
  CHECK_THROWS_AS(group[0].call(1, &failAlways), Error);
  const auto find = [](Node& node, const std::string& function, CallMetrics::Side side) {
    for (auto& row : node.callMetrics()) {
      if (row.function == function && row.side == side) return row;
    }
    FAIL("no row of " << function);
    throw;
  };
  const auto made = find(group[0], "tenantOf", CallMetrics::Side::kMade);
  CHECK(made.peer == "worker1");
  CHECK(made.calls == 5);
  CHECK(made.in_flight == 0);
  CHECK(made.p50 > 0ns);
  CHECK(made.p50 <= made.p90);
  CHECK(made.p90 <= made.p99);
  CHECK(made.total >= 5 * made.p50 / 4);
  CHECK(made.request_bytes > 0);
  const auto failed = find(group[1], "failAlways", CallMetrics::Side::kServed);
  CHECK(failed.errors.size() == 1);
  CHECK(failed.errors.at(ErrorCode::kUserException) == 1);
  CHECK(group[0].nodeMetrics().connections == 1);
  CHECK(group[0].nodeMetrics().threads >= 1);
  group.shutdown();
}

TEST_CASE("a node writes its counters as text for Prometheus, under the names that Python workers have") {
  registerFunction("odd \"name\"", [] {});
  Group group(2, [](NodeOptions& options) { options.metrics = true; });
  for (int i = 0; i < 5; ++i) group[0].call(1, &tenantOf);
  CHECK_THROWS_AS(group[0].call(1, &failAlways), Error);
  group[0].call(1, "odd \"name\"");
  const auto text = group[0].prometheusText();
  const auto has = [&text](const std::string& line) { return text.find(line + "\n") != std::string::npos; };
  const std::string tenant = R"({worker="worker0",function="tenantOf",peer="worker1",side="out")";
  CHECK(has("# TYPE torchrpc_calls_total counter"));
  CHECK(has("torchrpc_calls_total" + tenant + "} 5"));
  CHECK(has("torchrpc_call_latency_seconds_bucket" + tenant + R"(,le="+Inf"} 5)"));
  CHECK(has("torchrpc_call_latency_seconds_count" + tenant + "} 5"));
  CHECK_THAT(text, Catch::Contains("torchrpc_call_latency_seconds_bucket" + tenant + ",le=\"34.35"));
  CHECK_THAT(text, Catch::Contains(R"(function="failAlways",peer="worker1",side="out",code="user exception"} 1)"));
  CHECK_THAT(text, Catch::Contains(R"(function="odd \"name\"",)"));
  CHECK(has(R"(torchrpc_workers{worker="worker0"} 2)"));
  CHECK(has(R"(torchrpc_connections{worker="worker0"} 1)"));
  group.shutdown();
}

TEST_CASE("each error of a call names a worker: this one, or the callee") {
  Group group(2);
  const auto& node = group[0];
  const auto worker = [](const std::function<void()>& body) { return errorOf(body).worker(); };
  CHECK(worker([&] { node.call("worker1", op("no scope")); }) == "worker0");
  CHECK(worker([&] { node.call("worker1", python("no_module")); }) == "worker0");
  CHECK(worker([&] { static_cast<void>(node.withRetries({.retries = 1}).remote<int>(1, "tenantOf")); }) == "worker0");
  CHECK_FALSE(worker([&] { node.call("worker9", &tenantOf); }).empty());
  CHECK_FALSE(worker([&] { static_cast<void>(node.worker(9)); }).empty());
  CHECK(worker([&] { group[0].waitForStopRequest(-1s); }) == "worker0");
  CHECK(worker([&] { group[0].shutdown(0s); }) == "worker0");
  CHECK(worker([&] { node.call(1, Callable("no such function")); }) == "worker1");
  CHECK(worker([&] { node.call<int>(1, "tenantOf"); }) == "worker1");
  CHECK(worker([&] { node.call<at::Tensor>(1, op("aten::mm"), at::ones({2, 3}), at::ones({2, 3})); }) == "worker1");
  std::latch arrived{1}, released{1};
  registerFunction("waitsForTest", [&] {
    arrived.count_down();
    released.wait();
  });
  auto call = node.callAsync(1, "waitsForTest");
  arrived.wait();
  CHECK(call.cancel());
  CHECK(worker([&] { call.wait(); }) == "worker1");
  released.count_down();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  CHECK(worker([&] { Node({.name = "w", .rank = 0, .world_size = 1, .threads = 0}, store); }) == "w");
  group.shutdown();
}
