// The end of nodes beside threads that call, and functions and continuations on executors of the program.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "api/group.h"
#include "outcomes.h"
#include "torchrpc/function.h"
#include "torchrpc/task.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

int echoAtEnd(int x) { return x; }
TORCHRPC_FUNCTION(echoAtEnd);
int echoBack(const Call& call, int x) { return call.node.call(call.caller, &echoAtEnd, x); }
TORCHRPC_FUNCTION(echoBack);

/// Calls back on a thread that all calls of this function use.
int echoByHelper(const Call& call, int x) {
  static const Executor helper = Executor::threads(1);
  std::promise<int> result;
  helper.post()([&] {
    try {
      for (int i = 0; i < 3; ++i) call.node.call(call.caller, &echoAtEnd, x);
      result.set_value(call.node.call(call.caller, &echoAtEnd, x));
    } catch (...) {
      result.set_exception(std::current_exception());
    }
  });
  return result.get_future().get();
}
TORCHRPC_FUNCTION(echoByHelper);

double secondsOf(const std::function<void()>& body) {
  const auto begun = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

/// How late a busy machine may be, in seconds. A fault that the tests below look for takes longer: 5 s (the time that
/// functions have to answer) or 20 s (the time-out of calls).
constexpr double kLate = 3;

/// Threads that call until they get an error.
class Callers {
 public:
  Callers(const NodeRef& node, int count, const std::string& function) : made_(count) {
    for (auto& made : made_) threads_.emplace_back([this, node, function, &made] { run(node, function, made); });
  }
  ~Callers() { join(); }
  Callers(const Callers&) = delete;
  Callers& operator=(const Callers&) = delete;

  bool haveCalled() const {
    return std::ranges::all_of(made_, [](const auto& made) { return made > 0; });
  }
  /// Waits for their errors.
  std::vector<Error> join() {
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    const std::scoped_lock lock(mutex_);
    return errors_;
  }

 private:
  void run(const NodeRef& node, const std::string& function, std::atomic<int>& made) {
    try {
      for (int i = 0;; ++i, ++made) node.call<int>(1 - node.self().id, function, i);
    } catch (const Error& error) {
      const std::scoped_lock lock(mutex_);
      errors_.push_back(error);
    }
  }

  std::vector<std::atomic<int>> made_;
  std::mutex mutex_;
  std::vector<Error> errors_;
  std::vector<std::thread> threads_;
};

/// A thread of the program with a queue, as the event loop of a program.
class OwnLoop {
 public:
  ~OwnLoop() {
    post(nullptr);
    thread_.join();
  }
  Executor executor() {
    return Executor::Post([this](std::function<void()> task) { post(std::move(task)); });
  }

 private:
  void post(std::function<void()> task) {
    const std::scoped_lock lock(mutex_);
    queue_.push_back(std::move(task));
    added_.notify_one();
  }
  void run() {
    for (std::function<void()> task;;) {
      {
        std::unique_lock lock(mutex_);
        added_.wait(lock, [this] { return !queue_.empty(); });
        task = std::move(queue_.front());
        queue_.pop_front();
      }
      if (!task) return;
      task();
      task = nullptr;
    }
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_{[this] { run(); }};
};

}  // namespace

TEST_CASE("shutdown() beside threads that call ends their calls with an error and returns") {
  const auto callers_of_each = GENERATE(1, 8);
  const std::string function = GENERATE("echoAtEnd", "echoBack");
  Group group(2);
  Callers first(group[0], callers_of_each, function), second(group[1], callers_of_each, function);
  REQUIRE(test::eventually([&] { return first.haveCalled() && second.haveCalled(); }));
  // The limit is far below the time-out of shutdown(), which would end the calls as well.
  CHECK(secondsOf([&] { group.shutdown(); }) < 10);
  for (auto* callers : {&first, &second}) {
    const auto errors = callers->join();
    CHECK(errors.size() == static_cast<size_t>(callers_of_each));
    for (const auto& error : errors) {
      CHECK(error.code() == ErrorCode::kShutdown);
      CHECK_THAT(error.text(), Catch::Contains("shut"));
    }
  }
}

TEST_CASE("from shutdown() on new calls of this worker fail, and calls of others are served") {
  Group group(2);
  const NodeRef node = group[0];
  std::thread ending([&] { group[0].shutdown(20s); });
  Error error(ErrorCode::kUnknown, "");
  CHECK(test::eventually([&] {
    try {
      node.call(1, &echoAtEnd, 1);
    } catch (const Error& caught) {
      error = caught;
    }
    return error.code() == ErrorCode::kShutdown;
  }));
  CHECK_THAT(error.text(), Catch::Contains("worker0 is shutting down and makes no new calls"));
  const auto creation = errorOf([&] { node.remote<int>(1, "echoAtEnd", 1).toHere(); });
  CHECK_THAT(creation.text(), Catch::Contains("worker0 is shutting down and makes no new calls"));
  CHECK(group[1].call(0, &echoBack, 3) == 3);  // a served function may call
  group[1].shutdown(20s);
  ending.join();
}

TEST_CASE("while a worker shuts down, a thread for which the functions that it serves wait may call") {
  Group group(2);
  std::thread ending([&] { group[0].shutdown(20s); });
  REQUIRE(test::eventually(
      [&] { return test::errorOf([&] { group[0].call(1, &echoAtEnd, 1); }).code() == ErrorCode::kShutdown; }));
  for (int i = 0; i < 50; ++i) {  // each function begins after the calls that the thread has made for others
    CHECK(group[1].call(0, &echoByHelper, i) == i);
  }
  std::vector<Future<int>> at_once;
  for (int i = 0; i < 20; ++i) at_once.push_back(group[1].callAsync(0, &echoByHelper, i));
  for (int i = 0; i < 20; ++i) CHECK(at_once[static_cast<size_t>(i)].wait() == i);
  group[1].shutdown(20s);
  ending.join();
}

TEST_CASE("shutdown() throws in time although the other worker does not come and threads go on calling") {
  const auto callers_of_each = GENERATE(1, 8);
  Group group(2);
  Callers own(group[0], callers_of_each, "echoAtEnd"), foreign(group[1], callers_of_each, "echoBack");
  REQUIRE(test::eventually([&] { return own.haveCalled() && foreign.haveCalled(); }));
  CHECK(secondsOf([&] { CHECK(errorOf([&] { group[0].shutdown(1s); }).code() == ErrorCode::kTimeout); }) < 1 + kLate);
}

TEST_CASE("shutdown() returns in time although another worker has left, connected or not") {
  const bool is_connected = GENERATE(false, true);
  const auto limit = GENERATE(300ms, 1000ms);
  const auto leaving = GENERATE(0, 1);
  Group group(2);
  if (is_connected) CHECK(group[0].call(1, &echoAtEnd, 1) == 1);
  CHECK(group[leaving].leave(5s));
  CHECK(secondsOf([&] { group[1 - leaving].shutdown(limit); }) < kLate + std::chrono::duration<double>(limit).count());
}

TEST_CASE("shutdown() ends in time although another worker has left without its functions") {
  std::latch arrived{1}, release{1};
  registerFunction("outlivesItsWorker", [&] {
    arrived.count_down();
    release.wait();
  });
  Group group(2);
  const auto call = group[0].callAsync<void>(1, "outlivesItsWorker");
  arrived.wait();
  CHECK_FALSE(group[1].leave(100ms));
  CHECK(errorOf([&] { call.wait(); }).code() == ErrorCode::kWorkerLost);
  CHECK(secondsOf([&] { group[0].shutdown(1s); }) < 1 + kLate);
  release.count_down();
}

TEST_CASE("leave() refuses a time-out that is not positive, and the worker goes on") {
  Group group(2);
  const auto error = errorOf([&] { group[0].leave(0s); });
  CHECK(error.code() == ErrorCode::kInvalidArgument);
  CHECK_THAT(error.text(), Catch::Contains("leave() is 0"));
  CHECK(errorOf([&] { group[0].leave(-1s); }).code() == ErrorCode::kInvalidArgument);
  CHECK_THAT(errorOf([&] { group[0].leave(std::chrono::duration<double>(NAN)); }).text(), Catch::Contains("NaN"));
  CHECK(group[0].call(1, &echoAtEnd, 1) == 1);
}

TEST_CASE("the call of a function that destroys its own node fails, and the node refuses later calls") {
  const auto caller = GENERATE(0, 1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Node>> nodes(2);
  std::vector<std::thread> starting;
  for (int rank = 0; rank < 2; ++rank) {
    starting.emplace_back([&, rank] {
      const NodeOptions options{.name = "node" + std::to_string(rank), .rank = rank, .world_size = 2, .timeout = 20s};
      nodes[rank] = std::make_unique<Node>(options, store);
    });
  }
  for (auto& thread : starting) thread.join();
  static int number = 0;
  const auto name = "destroysItsNode" + std::to_string(number++);
  registerFunction(name, [&] { nodes[1].reset(); });
  const NodeRef self = *nodes[1];
  const auto from = caller == 1 ? self : NodeRef(*nodes[0]);
  const auto error = errorOf([&] { from.call(1, name); });
  CHECK(error.code() == ErrorCode::kShutdown);
  CHECK_THAT(error.text(), Catch::Contains(name) && Catch::Contains("requestStop()"));
  CHECK(errorOf([&] { self.call(0, &echoAtEnd, 1); }).code() == ErrorCode::kShutdown);
  const auto later = errorOf([&] { nodes[0]->call(1, &echoAtEnd, 1); });
  CHECK((later.code() == ErrorCode::kShutdown || later.code() == ErrorCode::kWorkerLost));
  CHECK(secondsOf([&] { nodes[0].reset(); }) < 6);
}

namespace {

/// A store whose process ends after some requests.
class DyingStore final : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    if (--requests_left_ < 0) C10_THROW_ERROR(DistNetworkError, "Broken pipe");
    return HashStore::check(keys);
  }
  explicit DyingStore(int requests) : requests_left_(requests) {}

 private:
  std::atomic<int> requests_left_;
};

}  // namespace

TEST_CASE("a node whose store ends while the group forms gets an error of ours, without a stack trace") {
  const auto requests = GENERATE(0, 1, 2, 3, 5, 10);
  const NodeOptions options{.name = "worker0", .rank = 0, .world_size = 2, .init_timeout = 20s};
  const auto error = errorOf([&] { Node(options, c10::make_intrusive<DyingStore>(requests)); });
  CHECK(error.code() == ErrorCode::kRendezvous);
  CHECK_THAT(error.text(), Catch::Contains("worker0") && Catch::Contains("Broken pipe. The process that serves it"));
  CHECK_THAT(error.text(), !Catch::Contains("Exception raised from"));
}

TEST_CASE("stop() and leave() beside threads that call end their calls") {
  const std::string how = GENERATE("stop", "leave");
  Group group(2);
  Callers own(group[0], 8, "echoAtEnd"), foreign(group[1], 8, "echoBack");
  REQUIRE(test::eventually([&] { return own.haveCalled() && foreign.haveCalled(); }));
  CHECK(secondsOf([&] { how == "stop" ? group[0].stop() : static_cast<void>(group[0].leave(2s)); }) < 7);
  for (const auto& error : own.join()) CHECK(error.code() == ErrorCode::kShutdown);
}

TEST_CASE("shutdown() throws in time although functions run, and names them; the destructor waits for them") {
  const bool has_own_threads = GENERATE(false, true);
  std::latch arrived{1}, release{1};
  std::atomic<bool> has_returned{false};
  static int number = 0;
  const auto name = "runsPastTheEnd" + std::to_string(number++);
  registerFunction(
      name,
      [&] {
        arrived.count_down();
        release.wait();
        has_returned = true;
      },
      {.executor = has_own_threads ? Executor::threads(1) : Executor::pool()});
  {
    Group group(2);
    const auto call = group[0].callAsync<void>(1, name);
    arrived.wait();
    CHECK(secondsOf([&] {
            const auto error = errorOf([&] { group[1].shutdown(500ms); });
            CHECK(error.code() == ErrorCode::kTimeout);
          }) < 0.5 + kLate);
    const auto again = errorOf([&] { group[1].shutdown(100ms); });
    CHECK(again.code() == ErrorCode::kTimeout);
    CHECK_THAT(again.text(), Catch::Contains(name) && Catch::Contains("worker0"));
    CHECK_FALSE(has_returned);
    release.count_down();
    CHECK_THROWS_AS(call.wait(), Error);
  }
  CHECK(has_returned);
}

TEST_CASE("stop() and the destructor wait for functions and continuations that run on executors") {
  const std::string end = GENERATE("stop", "destructor");
  const std::string what = GENERATE("function", "continuation");
  const std::string kind = GENERATE("threads", "loop");
  OwnLoop loop;
  const auto executor = kind == "threads" ? Executor::threads(2) : loop.executor();
  static int number = 0;
  const auto name = "usesWhatIsDestroyed" + std::to_string(number++);
  std::latch arrived{1}, release{1};
  std::atomic<bool> has_returned{false};
  const auto body = [&] {
    arrived.count_down();
    release.wait();
    has_returned = true;
  };
  registerFunction(name, body, {.executor = executor});
  NodeOptions options{.name = "alone", .rank = 0, .world_size = 1};
  auto node = std::make_unique<Node>(options, c10::make_intrusive<c10d::HashStore>());
  Future<void> done;
  if (what == "function") done = node->callAsync<void>(0, name);
  if (what == "continuation") done = node->callAsync(0, &echoAtEnd, 1).then(executor, [&](int) { body(); });
  arrived.wait();
  std::atomic<bool> has_ended{false}, ended_too_early{false};
  std::thread ending([&] {
    if (end == "stop") node->stop();
    if (end == "destructor") node.reset();
    ended_too_early = !has_returned;
    has_ended = true;
  });
  CHECK(test::remains([&] { return !has_ended; }));
  release.count_down();
  ending.join();
  CHECK_FALSE(ended_too_early);
  node.reset();
}

TEST_CASE("a call that its executor has queued does not run after stop()") {
  std::mutex mutex;
  std::vector<std::function<void()>> queue;
  const Executor queued([&](std::function<void()> task) {
    const std::scoped_lock lock(mutex);
    queue.push_back(std::move(task));
  });
  std::atomic<int> ran{0};
  registerFunction("runsTooLate", [&] { ++ran; }, {.executor = queued});
  Group group(2);
  const auto call = group[0].callAsync<void>(1, "runsTooLate");
  REQUIRE(test::eventually([&] {
    const std::scoped_lock lock(mutex);
    return !queue.empty();
  }));
  group[1].stop();
  for (const auto& task : queue) task();
  queue.clear();
  CHECK(ran == 0);
  CHECK_THROWS_AS(call.wait(), Error);
}

TEST_CASE("code that a node runs on any thread gets an error when it ends the node") {
  const std::string where = GENERATE("function", "threads", "loop", "inlined", "inlined, ready", "pool", "task");
  const std::string end = GENERATE("shutdown", "leave", "stop");
  OwnLoop loop;
  std::unique_ptr<Node> node;
  std::atomic<bool> has_asked{false};
  Error error(ErrorCode::kUnknown, "");
  double seconds = 0;
  const auto ends = [&] {
    if (has_asked) return;
    seconds = secondsOf([&] {
      try {
        if (end == "shutdown") node->shutdown(20s);
        if (end == "leave") node->leave(20s);
        if (end == "stop") node->stop();
      } catch (const Error& caught) {
        error = caught;
      }
    });
    has_asked = true;
  };
  static int number = 0;
  const auto name = "endsItsNode" + std::to_string(number++);
  std::latch release{1};
  registerFunction(name + "Gate", [&] { release.wait(); });
  const auto executor = where == "threads" ? Executor::threads(1)
      : where == "loop"                    ? loop.executor()
                                           : Executor::pool();
  registerFunction(name, ends, {.executor = executor});
  NodeOptions options{.name = "alone", .rank = 0, .world_size = 1};
  node = std::make_unique<Node>(options, c10::make_intrusive<c10d::HashStore>());
  if (where == "function" || where == "threads" || where == "loop") node->call(0, name);
  const auto gate = node->callAsync<void>(0, name + "Gate");
  Future<void> task;
  if (where == "task") {  // begins to wait before the gate opens, so that it goes on, on the pool
    const auto waits = [](Future<void> awaited, std::function<void()> then) -> Task<void> {
      co_await awaited;
      then();
    };
    task = waits(gate, ends).start(*node);
  }
  if (where == "inlined") {
    const auto done = gate.then(Executor::inlined(), ends);
    release.count_down();
    done.wait();
  } else {
    release.count_down();
    gate.wait();
  }
  if (where == "inlined, ready") gate.then(Executor::inlined(), ends).wait();
  if (where == "pool") gate.then(ends).wait();
  if (where == "task") task.wait();
  REQUIRE(has_asked);
  CHECK(error.code() == ErrorCode::kInvalidArgument);
  CHECK_THAT(error.text(), Catch::Contains("requestStop()") && Catch::Contains("alone"));
  CHECK(seconds < kLate);
  CHECK(node->call(0, &echoAtEnd, 5) == 5);  // it goes on
  node.reset();
}

TEST_CASE("an inlined continuation on a time-out gets an error when it ends the node") {
  std::unique_ptr<Node> node;
  std::latch release{1};
  registerFunction("timesOutAtEnd", [&] { release.wait(); });
  NodeOptions options{.name = "alone", .rank = 0, .world_size = 1};
  node = std::make_unique<Node>(options, c10::make_intrusive<c10d::HashStore>());
  const auto future = node->withTimeout(10ms).callAsync<void>(0, "timesOutAtEnd");
  const auto done = future.thenError(Executor::inlined(), [&](const Error&) { node->stop(); });
  CHECK(errorOf([&] { done.wait(); }).code() == ErrorCode::kInvalidArgument);
  release.count_down();
  node.reset();
}

TEST_CASE("a node whose group has not formed stops to wait when that is requested, and later asks to be stopped") {
  std::stop_source stop;
  NodeOptions options{.name = "worker0", .rank = 0, .world_size = 2, .stop = stop.get_token()};
  std::thread requesting([&] {
    std::this_thread::sleep_for(20ms);  // during the construction, if it gets that far
    stop.request_stop();
  });
  CHECK(secondsOf([&] {
          const auto error = errorOf([&] { Node(options, c10::make_intrusive<c10d::HashStore>()); });
          CHECK(error.code() == ErrorCode::kCancelled);
        }) < 5);
  requesting.join();
  CHECK(errorOf([&] { Node(options, c10::make_intrusive<c10d::HashStore>()); }).code() == ErrorCode::kCancelled);

  std::stop_source later;
  options = {.name = "alone", .rank = 0, .world_size = 1, .stop = later.get_token()};
  Node node(options, c10::make_intrusive<c10d::HashStore>());
  CHECK_FALSE(node.waitForStopRequest(1ms));
  later.request_stop();
  CHECK(node.waitForStopRequest(20s));
}
